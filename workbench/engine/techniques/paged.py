"""Paged KV (PagedAttention): pages on demand instead of one reservation per sequence.

Off, every sequence reserves a contiguous run of slots for the whole context at admission, as
engines did before; on, it holds the pages its tokens need. The attention code is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """Options of paged KV."""

    page_size: int = option(
        0,
        choices=(0, 16, 32, 64, 128),
        unit="tokens",
        help="Slots per page; 0 lets the plan choose (64, or what the KV format needs). "
        "Small pages waste less, large pages read faster.",
    )
    decoded: str = option(
        "streaming",
        choices=("streaming", "resident"),
        help="How attention reads coded KV. streaming: decoded layer by layer in every step. resident: a "
        "decoded copy of all pages is kept beside the codes, as fast as plain KV and saving no memory.",
    )


SPEC = TechniqueSpec(
    id="paged",
    title="Paged KV",
    family="engine",
    seam="pages",
    kind="exact",
    summary="KV in fixed-size pages through block tables; waste is at most one page per sequence.",
    paper="https://arxiv.org/abs/2309.06180",
    stages=("schedule", "prefill", "decode"),
    claims_slot=("kv_allocation",),
    provides=("paged",),
    claims=(
        Claim(
            text="20.4–38.2% of KV memory holds token states in earlier systems; near-zero waste with paging",
            conditions="OPT-13B to 175B on A100s, ShareGPT and Alpaca traces; a utilisation figure",
            source="Kwon et al., SOSP 2023, Figure 2",
        ),
        Claim(
            text="2–4× throughput at equal latency",
            conditions="against FasterTransformer and Orca, same hardware",
            source="Kwon et al., SOSP 2023, abstract",
        ),
    ),
)


def bind(config: Config, context: Any) -> Config:
    """The settings themselves: the plan reads the page size, the engine allocates on demand."""
    return config
