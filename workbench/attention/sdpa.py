"""The default attention: exact softmax attention over pages, fast or pinned as the numerics class asks.

Named after the operation (scaled dot-product attention); the arithmetic is batched matrix products on the
page pool, because torch's own SDPA needs contiguous keys per sequence and is slow for one query row on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.attention.pages import TorchPages
from workbench.attention.pinned import PinnedAttention
from workbench.engine.seams import AttentionOp
from workbench.spec.technique import TechniqueSpec


@dataclass(frozen=True)
class Config:
    """No options: kernels are chosen from shapes, precision from the K/V dtype."""


SPEC = TechniqueSpec(
    id="sdpa",
    title="Paged torch attention",
    family="attention",
    seam="attention",
    kind="exact",
    summary="Scaled dot-product attention on the page pool in plain torch; shared pages are read once.",
    paper="Kwon et al. 2023, Efficient Memory Management for LLM Serving with PagedAttention, §4",
    stages=("attention",),
    claims_slot=("attention",),
)


def bind(config: Config, context: Any) -> AttentionOp:
    """The fast form, or with ``context.numerics == "pinned"`` the form whose bits depend on nothing else."""
    if context.numerics == "pinned":
        return PinnedAttention(context.device)
    return TorchPages(context.device)
