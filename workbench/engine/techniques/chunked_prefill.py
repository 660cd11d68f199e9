"""Chunked prefill: long prompts run in pieces under a token budget, decodes never wait for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """Options of chunked prefill."""

    budget: int = option(
        256,
        low=1,
        high=8192,
        step=1,
        unit="tokens",
        help="Tokens per step, decodes and drafts included; what they leave goes to prompts.",
    )


SPEC = TechniqueSpec(
    id="chunked_prefill",
    title="Chunked prefill",
    family="engine",
    seam="scheduler",
    kind="exact",
    summary="Every decode gets a token in every step; prompts fill the rest of a fixed token budget.",
    paper="https://arxiv.org/abs/2403.02310",
    stages=("schedule", "prefill"),
    claims_slot=("token_budget",),
    provides=("chunked_prefill",),
    claims=(
        Claim(
            text="up to 2.6× serving capacity within latency targets",
            conditions="Mistral-7B on one A100, against vLLM of early 2024",
            source="Agrawal et al., OSDI 2024, abstract",
        ),
    ),
)


def bind(config: Config, context: Any) -> int:
    """The token budget of a step."""
    return config.budget
