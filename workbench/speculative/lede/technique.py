"""LEDE as a technique: options, what it says of itself, and how it is bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.lede.control import LedeControl, Policy
from workbench.speculative.lede.learnt import find


@dataclass(frozen=True)
class Config:
    """Options of ``lede``; exit and length of ``layerskip`` are not asked beside it."""

    policy: str = option(
        "auto",
        choices=("auto", "learnt", "fixed", "off"),
        help="Who chooses exit and length: the network where it was better on held-out text, always the "
        "network, the best fixed choice, or nobody (no drafts).",
    )
    longest: int = option(12, low=1, high=12, unit="tokens", help="Tokens drafted at most per step.")
    probe: int = option(
        32, low=1, high=1000, unit="steps", help="Steps between tries where drafts were found not to pay."
    )


SPEC = TechniqueSpec(
    id="lede",
    title="LEDE",
    family="speculative",
    seam="control",
    kind="exact",
    summary=(
        "Chooses behind which layer LayerSkip leaves the model and how far it drafts, round by round, as a "
        "Q-network has learnt offline from drafts at all exits; no draft is a choice too."
    ),
    paper="https://arxiv.org/abs/2606.03113",
    stages=("draft",),
    claims_slot=("draft_control",),
    needs=("early_exits",),
    claims=(
        Claim(
            "2.0 to 2.7 times faster than decoding token by token",
            "LayerSkip's Llama models of 1B to 34B, A100 80 GB, one sequence at a time",
            "https://arxiv.org/abs/2606.03113",
        ),
    ),
)


def bind(config: Config, context: Any) -> LedeControl:
    """The control with what was learnt for the model.

    Raises :class:`MissingHead` where nothing was, :class:`HeadMismatch` where it was for other weights.
    """
    learnt = find(context.model, context.fingerprint, context.config.num_layers)
    policy = cast(Policy, config.policy)
    return LedeControl(learnt, longest=config.longest, policy=policy, probe=config.probe)
