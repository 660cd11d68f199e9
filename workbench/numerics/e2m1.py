"""FP4 E2M1: a sign, two exponent bits, one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.

OCP Microscaling Formats specification 1.0, section 5.3.3; the element format of MXFP4 (blocks of 32 with a
power-of-two scale) and NVFP4 (blocks of 16 with an E4M3 scale and one float32 scale per tensor). There is no
infinity and no NaN: what lies beyond 6 saturates.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def to_e2m1(x: Tensor) -> Tensor:
    """Codes 0..15 (uint8) of floating-point ``x``: sign in bit 3, nearest magnitude, ties to the even code.

    Saturates at 6; NaN becomes 6 with its sign, as the format has none.
    """
    wide = x.dtype == torch.float64
    integers, mantissa, bias = (torch.int64, 52, 1023) if wide else (torch.int32, 23, 127)
    magnitude = x.abs() if wide else x.float().abs()
    magnitude = magnitude.nan_to_num_(nan=LARGEST)
    # Codes are two to a power of two, from exponent 0 (which zero and the subnormal share) to 2. In units of
    # half that power the code within is a whole number, and twice the exponent comes before it; an odd number
    # is an odd code, so round's ties to even are the format's.
    exponent = (magnitude.view(integers) >> mantissa).sub_(bias).clamp_(0, 2)
    units = (bias + 1 - exponent << mantissa).view(magnitude.dtype)  # 2^(1 - exponent)
    code = magnitude.mul_(units).round_().add_(exponent + exponent).clamp_(max=7).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(codes: Tensor) -> Tensor:
    """Values (float32) of codes 0..15; code 8 is -0."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float32, device=codes.device)
    return table[codes.long()]
