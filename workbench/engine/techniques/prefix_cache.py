"""Prefix cache: full pages stay findable by a hash chain, later prompts start behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.engine.prefix import PrefixIndex
from workbench.spec.technique import Claim, TechniqueSpec


@dataclass(frozen=True)
class Config:
    """The prefix cache has no options; requests are kept apart by their ``salt``."""


SPEC = TechniqueSpec(
    id="prefix_cache",
    title="Prefix cache (hash chain)",
    family="engine",
    seam="prefix",
    kind="exact",
    summary="Prompts with a common prefix share its pages; at least one prompt token is always computed.",
    paper="https://docs.vllm.ai/en/latest/design/prefix_caching.html",
    stages=("schedule", "prefill"),
    claims_slot=("prefix_index",),
    needs=("paged",),
    provides=("prefix_cache",),
    claims=(
        Claim(
            text="hashing costs about 100–200 ns per token",
            conditions="SHA-256 in vLLM",
            source="vLLM documentation, prefix caching",
        ),
    ),
)


def bind(config: Config, context: Any) -> PrefixIndex:
    """An empty index for the plan's page size."""
    return PrefixIndex(context.page_size)
