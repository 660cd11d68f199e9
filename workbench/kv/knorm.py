"""K-norm: tokens whose keys are short are kept.

Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression" (arXiv 2406.11430,
EMNLP 2024), section 3: in decoder models a low norm of a key goes with high attention to it, so no query is
needed. Sinks are protected besides.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workbench.engine.selection import CachedLayer
from workbench.kv.selection.exact import widened
from workbench.kv.selection.rules import KeepOptions, Rules
from workbench.kv.selection.selector import Selector, cache_only
from workbench.spec.technique import Claim, TechniqueSpec


@dataclass(frozen=True)
class Config(KeepOptions):
    """What is kept, and when."""


SPEC = TechniqueSpec(
    id="knorm",
    title="K-norm",
    family="kv",
    seam="kv_selector",
    kind="lossy",
    summary=(
        "Keeps the tokens with the shortest keys, per KV head. Needs keys only, so it costs almost nothing; "
        "it knows neither what is asked nor what values say."
    ),
    paper="https://arxiv.org/abs/2406.11430",
    claims_slot=("kv_selection",),
    needs=("paged",),
    sweep=("", "recent=64", "keep=0.25,recent=64"),
    claims=(
        Claim(
            "RULER needle-in-a-haystack 71.8 at 30% eviction.",
            "LLaMA-3.1-8B, 16K, baseline row of the CurDKV paper (Mistral-7B: 14.3)",
            "https://arxiv.org/abs/2509.15038",
        ),
    ),
)


def short_keys(layer: int, cached: CachedLayer) -> Tensor:
    """Scores [Hkv, S]: minus the norm of each key."""
    lengths: Tensor = widened(cached.keys).norm(dim=-1)
    return -lengths


def bind(config: Config, context: object) -> Selector:
    """The selector."""
    return cache_only("knorm", config, Rules.of(config), short_keys)
