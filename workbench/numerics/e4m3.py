"""FP8 E4M3 (``float8_e4m3fn``: 4 exponent bits, bias 7, 3 mantissa bits, no infinities, largest 448).

Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv 2209.05433), table 1. Torch's cast to
E4M3 turns what lies beyond the range into NaN, and its cast back runs one element at a time on a CPU;
both are replaced here, with the same values wherever torch's are finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
_SIGN_AND_MAGNITUDE = -16385  # int16 with every bit but 14: what remains after sign extension and the shift


def to_e4m3(x: Tensor) -> Tensor:
    """Round to nearest, ties to even, saturating at ±448; NaN stays NaN. Returns ``float8_e4m3fn``."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def e4m3_as_half(x: Tensor) -> Tensor:
    """``x / 256`` as float16, exactly, for every finite E4M3 value.

    E4M3's exponent and mantissa moved up by 7 bits are a float16 whose bias is larger by 8, subnormals
    included; so the cast is two integer operations, and the factor 256 joins the scale that follows.
    The two NaN codes come out as ±480 / 256.
    """
    bits = x.view(torch.int8).to(torch.int16)
    return bits.bitwise_left_shift_(7).bitwise_and_(_SIGN_AND_MAGNITUDE).view(torch.float16)


def from_e4m3(x: Tensor) -> Tensor:
    """E4M3 values as float32, exactly (finite codes)."""
    return e4m3_as_half(x).float().mul_(256.0)
