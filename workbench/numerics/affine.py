"""Uniform (affine) quantization with parameters stored in 16 bits.

Parameters are rounded to their stored dtype *first* and codes computed with the rounded ones, and
the rounding is directed so that the grid always covers the data. The error is then at most half a
stored step everywhere, with no clipping term to account for. Everything is elementwise or an exact
reduction, so results do not depend on how rows were batched.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY16 = 2.0**-24  # smallest positive float16
_MAX16 = 65504.0


def round_away16(x: Tensor, towards: float) -> Tensor:
    """Float32 ``x`` as the nearest float16 towards ``inf`` or ``-inf``, saturated to ±65504."""
    y = x.clamp(-_MAX16, _MAX16).half()
    moved = torch.nextafter(y, torch.full_like(y, towards)).clamp(-_MAX16, _MAX16)
    short = y.float() < x if towards > 0 else y.float() > x
    return torch.where(short, moved, y)


def symmetric_scale(amax: Tensor, top: float) -> Tensor:
    """A float16 scale, never 0, with ``top * scale >= amax`` (unless that passes 65504).

    The relative excess is at most 1.5 * 2^-10. A zero row gets the smallest scale there is, so that
    0 / scale is an exact 0 and nothing needs a branch.
    """
    return amax.mul((1 + 2.0**-10) / top).add_(_TINY16).clamp_(max=_MAX16).half()


def affine_parameters(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Float16 ``(minimum, step)`` of a grid of ``2^bits`` points that covers ``[low, high]`` (float32).

    ``minimum`` is rounded down and ``step`` up. A constant zero group gets minimum 0 and the smallest
    step, so it decodes to exactly 0.
    """
    minimum = round_away16(low, -torch.inf)
    step = round_away16((high - minimum.float()) / (2**bits - 1), torch.inf)
    return minimum, step.clamp_(min=_TINY16)


def affine_codes(x: Tensor, minimum: Tensor, step: Tensor, bits: int) -> Tensor:
    """Codes 0..2^bits - 1 (uint8) of float32 ``x``: round((x - minimum) / step), saturated."""
    return ((x - minimum.float()) / step.float()).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def affine_values(codes: Tensor, minimum: Tensor, step: Tensor) -> Tensor:
    """What the codes stand for, float32: minimum + code * step."""
    return torch.addcmul(minimum.float(), codes.float(), step.float())
