"""Options of the codec: what a panel shows and a recipe says."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.spec.technique import Claim, option


@dataclass(frozen=True)
class Config:
    """Ratios are before entropy coding, of coded tokens only; sinks and window come on top."""

    k_ratio: float = option(
        16.0, unit="×", low=2, high=256, help="Bits of keys: 16-bit size over this. Usual: 8, 16, 32, 64."
    )
    v_ratio: float = option(16.0, unit="×", low=2, high=256, help="Bits of values: 16-bit size over this.")
    sinks: int = option(
        4, unit="tokens", low=0, high=64, help="First tokens kept in 16 bits; 0 ruins quality, and shows why."
    )
    window: int = option(
        128,
        unit="tokens",
        low=0,
        high=4096,
        help="Latest tokens kept in 16 bits. 128 is the paper's; at 1,000 tokens 16 saves more than twice.",
    )
    entropy: str = option(
        "deflate",
        choices=("deflate", "range", "none"),
        help="deflate: the paper's. range: adaptive models, smaller and slower. none: packed codes.",
    )


CLAIMS = (
    Claim(
        "Within one point of 16-bit KV at 16x before DEFLATE, 18x to 22x after it.",
        "Llama-3.1-8B: GSM8K, MMLU, Qasper, LITM, RULER-VT; coded tokens only, without the last 128",
        "https://arxiv.org/abs/2511.01815",
    ),
    Claim(
        "40x and more for specific use cases.",
        "64x before DEFLATE; LITM falls from 99.8 to 90.2 and RULER-VT from 99.8 to 95.9",
        "https://arxiv.org/abs/2511.01815",
    ),
)

SHORT = {"ratio": ("k_ratio", "v_ratio")}
"""What sets several options at once, where a method is measured."""

SWEEP = tuple(
    f"k_ratio={ratio},v_ratio={ratio}{stage}"
    for stage in ("", ",entropy=range")
    for ratio in (4, 8, 16, 32, 64)
)
"""Its points on a rate-distortion curve, with both entropy stages."""


@dataclass(frozen=True)
class GradedConfig:
    """KVTC by age (:mod:`workbench.kv.kvtc.graded`): ratios before entropy coding, of coded tokens only."""

    k_ratio: float = option(48.0, unit="×", low=2, high=256, help="Keys of tokens older than all grades.")
    v_ratio: float = option(48.0, unit="×", low=2, high=256, help="Values of those.")
    near: str = option(
        "64x8/448x24", help="Grades, the newest first: TOKENSxRATIO, or TOKENSxKEYS:VALUES, tokens by 16."
    )
    sinks: int = option(4, unit="tokens", low=0, high=64, help="First tokens kept in 16 bits.")
    window: int = option(0, unit="tokens", low=0, high=4096, help="Latest tokens kept in 16 bits.")
    entropy: str = option("deflate", choices=("deflate", "range", "none"), help="As in kvtc.")


GRADED_SWEEP = tuple(f"ratio={ratio}{stage}" for stage in ("", ",entropy=range") for ratio in (32, 64, 96))
"""Points of KVTC by age."""
