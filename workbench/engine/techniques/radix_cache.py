"""Radix cache: prompts share what they have in common to the token, and those that share most go first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.engine.radix import RadixIndex
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """The order of waiting requests; requests are kept apart by their ``salt``."""

    order: str = option(
        "longest_prefix",
        choices=("longest_prefix", "arrival"),
        help="Which waiting request starts next: the one with most of its prompt cached (overtaking is "
        "bounded), or the oldest.",
    )


SPEC = TechniqueSpec(
    id="radix_cache",
    title="Prefix cache (radix tree)",
    family="engine",
    seam="prefix",
    kind="exact",
    summary=(
        "A tree of token sequences whose nodes split where prompts diverge: hits are exact to the token, the "
        "head of a shared page is copied. Formats that code whole pages share full pages only."
    ),
    paper="https://arxiv.org/abs/2312.07104",
    stages=("schedule", "prefill"),
    claims_slot=("prefix_index",),
    needs=("paged",),
    provides=("prefix_cache",),
    claims=(
        Claim(
            text="up to 6.4× the throughput of systems without prefix reuse",
            conditions="programs of many calls with shared prefixes, several models and tasks",
            source="https://arxiv.org/abs/2312.07104",
        ),
    ),
)


def bind(config: Config, context: Any) -> RadixIndex:
    """An empty tree for the plan's page size."""
    return RadixIndex(context.page_size, longest_first=config.order == "longest_prefix")
