"""Rules that look right and are not: each is wrong in one way that was shipped somewhere.

They are controls. A check of exactness that they pass is no check; the tests and the notebook of acceptance
rules run them beside the real ones. No technique uses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.spec.errors import InvariantError
from workbench.speculative import rules
from workbench.speculative.exact_law import Drafts, Rule, sampled_chains

_Rest = Callable[[Tensor, Tensor, int], Tensor]
_Bonus = Callable[[Tensor, Tensor], Tensor]


def _chain(tree: DraftTree, p: Tensor, sample: Any, coin: Any, rest: _Rest, bonus: _Bonus) -> Verdict:
    q = tree.q
    if q is None:
        raise InvariantError("This imitation judges sampled drafts.")
    for i, x in enumerate(tree.tokens):
        if not coin(i, 0) < float(p[i, x] / q[i, x]):
            return Verdict(tuple(range(i)), sample(rest(p[i], q[i], x), i), True)
    return Verdict(tuple(range(len(tree.tokens))), sample(bonus(p, q), len(tree.tokens)), False)


def _residual(p: Tensor, q: Tensor, x: int) -> Tensor:
    return rules.residual(p, q)


def _p(p: Tensor, q: Tensor, x: int) -> Tensor:
    return p


def _without(p: Tensor, q: Tensor, x: int) -> Tensor:
    left = p.index_fill(0, torch.tensor([x]), 0)
    return left / left.sum() if float(left.sum()) > 0 else p


def _last_p(p: Tensor, q: Tensor) -> Tensor:
    return p[-1]


def resample_from_p(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
    """A rejection draws from p instead of the residual: what was accepted is counted twice."""
    return _chain(tree, p, sample, coin, _p, _last_p)


def bonus_from_q(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
    """The bonus token comes from the drafter."""
    return _chain(tree, p, sample, coin, _residual, lambda p, q: q[-1])


def one_hot_residual(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
    """Ratio p/q, but the residual of a deterministic draft."""
    return _chain(tree, p, sample, coin, _without, _last_p)


def no_renormalisation(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
    """Siblings of one node: the second is accepted with p(x) although the first was rejected."""
    left = p[0].clone()
    for i, x in enumerate(tree.tokens):
        if coin(0, i) < float(p[0, x]):
            return Verdict((i,), sample(p[i + 1], 1), False)
        left[x] = 0
    return Verdict((), sample(left / left.sum() if float(left.sum()) > 0 else p[0], 0), True)


SAMPLED_CHAINS: dict[str, Rule] = {
    "resample from p": resample_from_p,
    "bonus from q": bonus_from_q,
    "one-hot residual": one_hot_residual,
}
"""Imitations of R2, by what they do wrong."""


def filtered_by_raw(draft: Tensor, k: int, root: int = 0, top: int = 2) -> Drafts:
    """Drafts drawn from the ``top`` likeliest tokens only, which come with the unfiltered q."""
    bar = draft.topk(min(top, len(draft)), dim=-1).values[:, -1:]
    filtered = draft.where(draft >= bar, torch.zeros((), dtype=draft.dtype))
    filtered = filtered / filtered.sum(-1, keepdim=True)
    for chance, tree in sampled_chains(filtered, k, root):
        yield chance, DraftTree.chain(tree.tokens, "toy", draft[[root, *tree.tokens[:-1]]])


def dropped_if_unsure(draft: Tensor, k: int, root: int = 0, bar: float = 0.3) -> Drafts:
    """Sampled chains cut before a token that its drafter gave less than ``bar``: after it was drawn."""
    for chance, tree in sampled_chains(draft, k, root):
        q = draft[[root, *tree.tokens[:-1]]]
        keep = next((i for i, t in enumerate(tree.tokens) if float(q[i, t]) < bar), k)
        yield chance, DraftTree.chain(tree.tokens[:keep], "toy", q[:keep])


DRAFTS: dict[str, Callable[..., Drafts]] = {
    "filtered draw, raw q": filtered_by_raw,
    "unsure draws dropped": dropped_if_unsure,
}
"""Drafts that R2 cannot judge, since their q is not what they were drawn from, by what is wrong."""
