"""What a group of coefficients of one token can be stored as: int2, int4 or fp8, or dropped.

arXiv 2511.01815, section 3.2: a kept group carries a 16-bit shift and a 16-bit scale beside its codes. The
parameters are rounded to float16 first and codes computed with the rounded ones. Everything is per token and
group, so codes never depend on which tokens were coded together.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from workbench.numerics.affine import affine_codes, affine_parameters, affine_values, symmetric_scale
from workbench.numerics.e4m3 import LARGEST, from_e4m3, to_e4m3

Kind = Literal["int2", "int4", "fp8"]
BITS: dict[Kind, int] = {"int2": 2, "int4": 4, "fp8": 8}
KINDS: tuple[Kind, ...] = ("int2", "int4", "fp8")
HEADER_BITS = 32
SIZES = (1, 16, 64, 256, 1024)


def quantize(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """Codes uint8 [..., g], shift and scale float16 [..., 1] of coefficients float32 [..., g].

    Integers span the group's range. E4M3 is relative to the group's mean: its error grows with the distance
    from the shift, so the mean is the best one.
    """
    if kind == "fp8":
        # In float64, so that no order of summation can reach the rounding.
        shift = x.double().mean(-1, keepdim=True).float().half()
        rest = x - shift.float()
        scale = symmetric_scale(rest.abs().amax(-1, keepdim=True), LARGEST)
        return to_e4m3(rest / scale.float()).view(torch.uint8), shift, scale
    bits = BITS[kind]
    shift, scale = affine_parameters(x.amin(-1, keepdim=True), x.amax(-1, keepdim=True), bits)
    return affine_codes(x, shift, scale, bits), shift, scale


def dequantize(codes: Tensor, shift: Tensor, scale: Tensor, kind: Kind) -> Tensor:
    """What :func:`quantize` stored, float32 [..., g]."""
    if kind == "fp8":
        return torch.addcmul(shift.float(), from_e4m3(codes.view(torch.float8_e4m3fn)), scale.float())
    return affine_values(codes, shift, scale)
