"""Verification with the rule as an option; every choice leaves the target's output law unchanged.

Temperature 0 always uses R1. *auto* takes R3 for deterministic drafts (n-gram, argmax, top-k), R2 for
sampled ones (they carry their law q), and R6 where siblings were sampled without replacement. R5 judges
sampled chains as blocks and keeps at least as many tokens as R2. R4 works on any draft; on sampled ones it
accepts less often than R2 (Σ p·q instead of Σ min(p, q)), in exchange for seeded output that equals the
plain run's. See ``rules.py``, ``block.py`` and ``recursive.py`` for the papers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.engine.draft_seams import Coin, DraftTree, Sampler, Verdict
from workbench.spec.errors import OptionError
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative import rules
from workbench.speculative.block import block
from workbench.speculative.recursive import drawn_without_replacement, recursive


@dataclass(frozen=True)
class Config:
    """Options of ``verify``."""

    rule: str = option(
        "auto",
        choices=("auto", "r2", "r3", "r4", "r5", "r6"),
        help="Acceptance rule above temperature 0: r2 for sampled drafts, r3 for deterministic ones, "
        "r4 sample and match, r5 sampled chains as blocks, r6 siblings sampled without replacement; "
        "auto picks r2, r3 or r6 by draft.",
    )


SPEC = TechniqueSpec(
    id="verify",
    title="Exact verification",
    family="speculative",
    seam="verify",
    kind="exact",
    summary="Keeps drafted tokens so that the output law is the target's own: greedy match at temperature 0, "
    "rejection sampling or matching with the position's own noise above it.",
    paper="https://arxiv.org/abs/2211.17192",
    stages=("verify",),
    claims_slot=("verify",),
    needs=("drafter",),
    claims=(
        Claim(
            "2 to 2.5 times faster decoding without changing the distribution",
            "Chinchilla 70B in a distributed setup, benchmark tasks, sampled drafts judged by R2",
            "https://arxiv.org/abs/2302.01318",
        ),
    ),
)


_WITH_Q: dict[str, Callable[[DraftTree, Tensor, Sampler, Coin], Verdict]] = {
    "r2": rules.rejection,
    "r5": block,
    "r6": recursive,
}


class ExactVerify:
    """The ``verify`` seam for :class:`Config`; holds no state."""

    name = "verify"
    exact = True

    def __init__(self, rule: str = "auto") -> None:
        self.rule = rule

    def greedy(self, tree: DraftTree, best: Sequence[int]) -> Verdict:
        """R1; see :func:`workbench.speculative.rules.greedy`."""
        return rules.greedy(tree, best)

    def sampled(self, tree: DraftTree, p: Tensor, sample: Sampler, coin: Coin) -> Verdict:
        """R2 to R6; raises :class:`OptionError` when the chosen rule cannot judge the draft."""
        judge = _WITH_Q.get(self.rule_for(tree)) if tree.tokens else None
        return judge(tree, p, sample, coin) if judge is not None else rules.match(tree, p, sample)

    def rule_for(self, tree: DraftTree, *, greedy: bool = False) -> str:
        """The rule a draft is judged by, as recorded in ``DraftRecord.rule``; R1 at temperature 0."""
        if greedy:
            return "r1"
        if self.rule == "auto":
            return "r3" if tree.q is None else "r6" if drawn_without_replacement(tree) else "r2"
        if not tree.tokens:
            return self.rule
        if self.rule in _WITH_Q and tree.q is None:
            raise OptionError(
                f"verify.rule = {self.rule!r} needs the law each draft was drawn from; "
                f"{tree.source} has none.",
                hint="Choose auto or r3 for deterministic drafts.",
            )
        if self.rule == "r3" and tree.q is not None:
            raise OptionError(
                f"verify.rule = 'r3' is for deterministic drafts; {tree.source} samples its drafts.",
                hint="Choose auto or r2, or r4 to match samples regardless of q.",
            )
        if self.rule == "r5" and not tree.is_chain:
            raise OptionError(
                f"verify.rule = 'r5' judges chains; {tree.source} drafts trees with branches.",
                hint="Choose auto, r2 or r6.",
            )
        return self.rule


def bind(config: Config, context: Any = None) -> ExactVerify:
    """The verifier; nothing of the engine's context is needed."""
    return ExactVerify(config.rule)
