"""E8M0: an unsigned power of two in one byte, the block scale of the MX formats.

OCP Microscaling Formats specification 1.0, sections 5.4.1 and 6.3: byte ``b`` is 2^(b - 127), 255 is NaN, and
there is no zero. The scale of a block is the power of two of its largest element over that of the element
format's largest value, so a block's largest element may saturate.
"""

from __future__ import annotations

import torch
from torch import Tensor

BIAS = 127
NAN = 255


def block_scale(amax: Tensor, top_exponent: int) -> Tensor:
    """Scale bytes (uint8) of blocks whose largest magnitude is ``amax``.

    ``top_exponent`` is floor(log2) of the element format's largest value: 2 for E2M1, 8 for E4M3. A block of
    zeros gets the smallest scale; one that is not finite gets NaN.
    """
    # frexp: amax = m * 2^e with m in [0.5, 1), so floor(log2 amax) = e - 1, exactly, subnormals included.
    exponent = torch.frexp(amax.double())[1] - 1 - top_exponent
    code = (exponent + BIAS).clamp(0, NAN - 1)
    code = torch.where(amax == 0, torch.zeros_like(code), code)
    return torch.where(amax.isfinite(), code, torch.full_like(code, NAN)).to(torch.uint8)


def from_e8m0(codes: Tensor) -> Tensor:
    """Values (float32) of scale bytes; 2^-127 is a float32 subnormal, exactly."""
    values = ((codes.long() - BIAS + 1023) << 52).view(torch.float64).float()
    return torch.where(codes == NAN, torch.full_like(values, torch.nan), values)
