"""Exact acceptance rules as pure functions: which drafted path is kept, and the token that follows it.

R1 greedy; R2 rejection sampling of sampled drafts (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen
et al., arXiv 2302.01318, algorithm 2; for siblings SpecInfer, arXiv 2305.09781, multi-step speculative
sampling); R3 and R4 as :func:`match`. R5 is in ``block.py``, R6 in ``recursive.py``. A draft is a tree, a
chain is a tree without siblings, no draft at all is the empty tree. Rows: ``p[0]`` is the processed law at
the root, ``p[i + 1]`` at node ``i``; noise of depth 0 belongs to the token drawn from ``p[0]``, of depth d to
the one that follows d accepted tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.engine.draft_seams import Coin, DraftTree, Sampler, Verdict
from workbench.spec.errors import InvariantError


def greedy(tree: DraftTree, best: Sequence[int]) -> Verdict:
    """R1: keep drafted tokens while they are the model's choice. ``best`` as in ``Verify.greedy``."""
    check(tree, len(best))
    path: list[int] = []
    expected: list[float] = []
    at = -1
    while True:
        hit = _hit(tree, at, best[at + 1])
        expected += [float(c == hit) for c in _reached(tree, at, hit)]
        if hit is None:
            corrected = bool(children(tree, at))
            return Verdict(tuple(path), int(best[at + 1]), corrected, tuple(expected))
        path.append(hit)
        at = hit


def match(tree: DraftTree, p: Tensor, sample: Sampler) -> Verdict:
    """R3 for deterministic drafts, R4 (sample and match) for any: draw y ~ p, go on while y was drafted.

    *Same law as R3.* R3 accepts sibling x with probability p(x); else it zeroes p(x), renormalises and
    tries the next; after the last it samples what is left. Here y = x has probability p(x); given y ≠ x,
    y follows p without x, renormalised, which is the law R3 goes on with. By induction over siblings
    both accept x_j with probability p(x_j) and emit p restricted to the others otherwise.

    *Same tokens as no draft.* At every place on the path y is drawn from the place's own law with the
    place's own noise, and y is what is emitted, drafted or not. A plain run draws the very same y, so the
    output of a seeded run is the same ids with any drafts and with none, at any temperature.

    Exact for every candidate set, even one that was drawn with that very noise: such a *coupled* drafter is
    accepted with probability at least (1 - TV) / (1 + TV) of p and q (Daliri et al., arXiv 2408.07978), and
    the output still does not depend on it. ``expected`` is the chance of each sibling that was tried, given
    that those before it were not taken (of a set drawn without that noise).
    """
    check(tree, p.shape[0], p.shape[1])
    path: list[int] = []
    expected: list[float] = []
    at = -1
    while True:
        law = p[at + 1]
        y = sample(law, len(path))
        hit = _hit(tree, at, y)
        tried = _reached(tree, at, hit)
        expected += _chances(law, [tree.tokens[c] for c in tried])
        if hit is None:
            return Verdict(tuple(path), y, bool(tried), tuple(expected))
        path.append(hit)
        at = hit


def rejection(tree: DraftTree, p: Tensor, sample: Sampler, coin: Coin) -> Verdict:
    """R2: accept x ~ q with probability min(1, p(x)/q(x)); else go on with norm((p - q)₊).

    ``tree.q`` [n, V'] holds the law each node was really drawn from: given the siblings before it, when
    they were drawn without replacement. A smaller draft vocabulary V' < V counts as probability 0
    beyond it. Any other q (before filters, at another temperature, the soft law of an argmax draft), or
    dropping a drawn token after seeing it, biases the output. A token with q(x) = 0 cannot have been
    drawn, and raises :class:`InvariantError`.

    ``expected`` is Σ min(p, q) of each node that was tried: the acceptance chance before x was drawn.
    """
    check(tree, p.shape[0], p.shape[1])
    q = draft_laws(tree, p.shape[1]).to(p)
    path: list[int] = []
    expected: list[float] = []
    at = -1
    while True:
        law = p[at + 1]
        depth = len(path)
        hit = None
        for i, node in enumerate(children(tree, at)):
            x = tree.tokens[node]
            drawn = drawn_chance(tree, q, node)
            expected.append(float(torch.minimum(law, q[node]).sum()))
            if coin(depth, i) < float(law[x]) / drawn:
                hit = node
                break
            law = residual(law, q[node])
        if hit is None:
            return Verdict(tuple(path), sample(law, depth), bool(children(tree, at)), tuple(expected))
        path.append(hit)
        at = hit


def drawn_chance(tree: DraftTree, q: Tensor, node: int) -> float:
    """q of a node's own token; :class:`InvariantError` when that cannot have been drawn."""
    x = tree.tokens[node]
    drawn = float(q[node, x])
    if not drawn > 0:
        raise InvariantError(f"{tree.source} says it drew token {x} from a law that gives it {drawn}.")
    return drawn


def residual(p: Tensor, q: Tensor, weight: float = 1.0) -> Tensor:
    """norm((weight p - q)₊) [V]; p itself where nothing is left (p = q: only rounding can have rejected)."""
    left = (weight * p - q).clamp_min(0)
    total = left.sum()
    return left / total if float(total) > 0 else p


def draft_laws(tree: DraftTree, vocab: int) -> Tensor:
    """``tree.q`` [n, vocab], padded with zeros when the drafter's vocabulary is smaller.

    Raises :class:`InvariantError` when the laws are missing or give chances to ids the target lacks.
    """
    q = tree.q
    if q is None or q.shape[0] != len(tree.tokens):
        raise InvariantError(f"{tree.source} gives no draft law for each of its {len(tree.tokens)} tokens.")
    width = q.shape[1]
    if width < vocab:
        return torch.nn.functional.pad(q, (0, vocab - width))
    if bool(q[:, vocab:].any()):
        raise InvariantError(f"{tree.source} drafts from {width} ids, the target has {vocab}.")
    return q[:, :vocab]


def check(tree: DraftTree, rows: int, vocab: int | None = None) -> None:
    """Raise :class:`InvariantError` for a malformed tree, or one that does not fit ``rows`` and ``vocab``."""
    n = len(tree.tokens)
    if len(tree.parents) != n or rows != n + 1:
        raise InvariantError(
            f"{tree.source}: {n} drafted tokens, {len(tree.parents)} parents and {rows} rows do not fit."
        )
    for i, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if not -1 <= parent < i:
            raise InvariantError(
                f"{tree.source}: node {i} hangs below node {parent}, which is not before it."
            )
        if token < 0 or (vocab is not None and token >= vocab):
            raise InvariantError(f"{tree.source} drafted token {token}, which the target lacks.")


def children(tree: DraftTree, node: int) -> list[int]:
    """Nodes below ``node`` (-1: the root), in the order in which they are tried."""
    return [i for i, parent in enumerate(tree.parents) if parent == node]


def _hit(tree: DraftTree, node: int, token: int) -> int | None:
    return next((c for c in children(tree, node) if tree.tokens[c] == token), None)


def _reached(tree: DraftTree, node: int, hit: int | None) -> list[int]:
    """Children that were tried: all of them, or those up to the one that was taken."""
    return [c for c in children(tree, node) if hit is None or c <= hit]


def _chances(law: Tensor, tried: Sequence[int]) -> list[float]:
    left, out, seen = 1.0, [], set[int]()
    for token in tried:
        chance = 0.0 if token in seen else float(law[token])
        out.append(min(1.0, chance / left) if left > 0 else 0.0)
        left -= chance
        seen.add(token)
    return out
