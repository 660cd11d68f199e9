"""Typical acceptance: keep drafts that the model finds likely enough. Faster than exact rules, and lossy.

Cai et al., *Medusa* (arXiv 2401.10774, section 2.3.1): token x is kept when p(x) > min(ε, δ exp(-H(p))), with
H the entropy of the target's law in nats: where the model is sure the bar is ε, where it is not the bar sinks
below any fixed probability. The output law is not the target's: likely tokens are favoured. The share of
tokens that the target would have chosen otherwise is measured and shown with every run. At temperature 0
the law is one token, which alone passes: greedy output is the plain run's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from workbench.engine.draft_seams import Coin, DraftTree, Sampler, Verdict
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative import rules


@dataclass(frozen=True)
class Config:
    """Options of ``typical``; the defaults are those of the reference code (δ = √ε)."""

    epsilon: float = option(
        0.09,
        low=0.001,
        high=1.0,
        step=0.01,
        help="Probability that is always enough, however sure the model is.",
    )
    delta: float = option(
        0.3,
        low=0.01,
        high=1.0,
        step=0.01,
        help="Share of exp(-entropy) that is enough where the model is unsure.",
    )


SPEC = TechniqueSpec(
    id="typical",
    title="Typical acceptance",
    family="speculative",
    seam="verify",
    kind="lossy",
    summary="Keeps drafted tokens that are likely enough under the model instead of sampling from its law; "
    "changes the output law above temperature 0, by a measured share of tokens.",
    paper="https://arxiv.org/abs/2401.10774",
    stages=("verify",),
    claims_slot=("verify",),
    needs=("drafter",),
    claims=(
        Claim(
            "more than 2.2 times faster decoding",
            "Medusa-1 heads, Vicuna-7B, 13B and 33B, batch 1, typical acceptance of a tree of drafts",
            "https://arxiv.org/abs/2401.10774",
        ),
    ),
)


def typical(tree: DraftTree, p: Tensor, sample: Sampler, epsilon: float, delta: float) -> Verdict:
    """Keep the longest path whose every node passes its bar; of equally long ones the likeliest.

    ``p`` [n+1, V] the processed laws. The token behind the path is drawn from the target's own law there.
    ``expected`` of each node that was tried is the chance that its drafter's draw passes (1 or 0 for
    deterministic drafts); ``mismatch`` of each kept node is 1 - p(x).
    """
    rules.check(tree, p.shape[0], p.shape[1])
    above = thresholds(p, epsilon, delta)
    q = None if tree.q is None else rules.draft_laws(tree, p.shape[1]).to(p)
    paths: dict[int, tuple[int, ...]] = {-1: ()}
    likely = {-1: 0.0}
    expected: list[float] = []
    for i, (x, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        if parent not in paths:
            continue
        law, bar = p[parent + 1], above[parent + 1]
        chance = float(law[x])
        passes = chance > float(bar)
        expected.append(float(passes) if q is None else float(q[i, law > bar].sum()))
        if passes:
            paths[i] = (*paths[parent], i)
            likely[i] = likely[parent] + log(chance)
    leaf = max(paths, key=lambda i: (len(paths[i]), likely[i]))
    path = paths[leaf]
    mismatch = tuple(1 - float(p[tree.parents[i] + 1, tree.tokens[i]]) for i in path)
    token = sample(p[leaf + 1], len(path))
    return Verdict(path, token, bool(rules.children(tree, leaf)), tuple(expected), mismatch)


def thresholds(p: Tensor, epsilon: float, delta: float) -> Tensor:
    """min(ε, δ exp(-H)) of each law in ``p`` [R, V]: [R]."""
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return (delta * torch.exp(-entropy)).clamp_max(epsilon)


class TypicalVerify:
    """The ``verify`` seam for :class:`Config`; holds no state."""

    name = "typical"
    exact = False

    def __init__(self, config: Config) -> None:
        self.config = config

    def greedy(self, tree: DraftTree, best: Sequence[int]) -> Verdict:
        """R1: at temperature 0 only the model's choice is likely."""
        return rules.greedy(tree, best)

    def sampled(self, tree: DraftTree, p: Tensor, sample: Sampler, coin: Coin) -> Verdict:
        """See :func:`typical`."""
        return typical(tree, p, sample, self.config.epsilon, self.config.delta)

    def rule_for(self, tree: DraftTree, *, greedy: bool = False) -> str:
        """``r1`` at temperature 0, else ``typical``."""
        return "r1" if greedy else self.name


def bind(config: Config, context: Any = None) -> TypicalVerify:
    """The verifier; nothing of the engine's context is needed."""
    return TypicalVerify(config)
