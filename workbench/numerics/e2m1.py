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
# Midpoints between neighbours. At a midpoint the even code wins, so every second boundary belongs upward.
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_UP_AT_TIE = (False, True, False, True, False, True, False)


def to_e2m1(x: Tensor) -> Tensor:
    """Codes 0..15 (uint8) of floating-point ``x``: sign in bit 3, nearest magnitude, ties to the even code.

    Saturates at 6; NaN becomes 6 with its sign, as the format has none.
    """
    magnitude = x.abs().nan_to_num(nan=LARGEST)
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for midpoint, up in zip(_MIDPOINTS, _UP_AT_TIE, strict=True):
        code += (magnitude >= midpoint if up else magnitude > midpoint).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def from_e2m1(codes: Tensor) -> Tensor:
    """Values (float32) of codes 0..15; code 8 is -0."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=codes.device)
    return table[codes.long()]
