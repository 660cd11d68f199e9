"""StreamingLLM: attention sinks and the most recent tokens, and nothing between them.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453, ICLR 2024), section
3.2: the first tokens take the attention that a softmax has to spend somewhere; without them a window
breaks. In the paper positions are those within the cache, so kept keys are rotated anew (``rerotate``);
without it every token keeps its original position. With ``interval`` the cache stays bounded for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from workbench.engine.selection import CachedLayer
from workbench.kv.selection.rules import Rules, interval_option, keep_option, protocol_option, sinks_option
from workbench.kv.selection.selector import Selector, cache_only
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """What is kept, and when; the recent tokens are what the budget leaves after the sinks."""

    keep: float = keep_option()
    sinks: int = sinks_option()
    protocol: str = protocol_option()
    interval: int = interval_option(0)
    rerotate: bool = option(
        False,
        help="Kept tokens take consecutive positions, as in the paper, and the text goes on behind them: "
        "lengths beyond the trained context become possible.",
    )


SPEC = TechniqueSpec(
    id="streaming_llm",
    title="StreamingLLM",
    family="kv",
    seam="kv_selector",
    kind="lossy",
    summary=(
        "Keeps the first tokens (attention sinks) and the most recent ones, the same for every layer and "
        "head. Costs nothing to decide; whatever was said in the middle is gone."
    ),
    paper="https://arxiv.org/abs/2309.17453",
    claims_slot=("kv_selection",),
    needs=("paged",),
    sweep=("keep=0.75", "", "keep=0.25"),
    claims=(
        Claim(
            "RULER needle-in-a-haystack 68.2 at 30% eviction (full cache: not quoted).",
            "LLaMA-3.1-8B, 16K, baseline row of the CurDKV paper",
            "https://arxiv.org/abs/2509.15038",
        ),
    ),
)


def recency(layer: int, cached: CachedLayer) -> Tensor:
    """Scores float64 [Hkv, S]: the newer the higher."""
    return cached.positions.double()


def bind(config: Config, context: object) -> Selector:
    """The selector; it looks at positions only."""
    return cache_only("streaming_llm", config, Rules.of(config, recent=0), recency, rerotates=config.rerotate)
