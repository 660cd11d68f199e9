"""Rounding of keys and values to what pages hold, element by element as the codecs round.

The same rules as `workbench.numerics` (affine, e4m3, e2m1): scales are rounded to their stored format first
and codes computed with the rounded ones, divisions are exact (``div_rn``), ties go to even. Launched without
contraction of products and sums, the bytes equal those of the torch codecs.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TINY16 = tl.constexpr(2.0**-24)  # smallest positive float16
_MAX16 = tl.constexpr(65504.0)
_EXCESS = tl.constexpr(1 + 2.0**-10)
_MAGIC = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def round_even(x):
    """fp32 to the nearest whole number, ties to even, for magnitudes below 2^22."""
    return (x + _MAGIC) - _MAGIC


@triton.jit
def row_scale(amax, top: tl.constexpr):
    """The float16 scale of a row: ``top * scale >= amax``, never 0 (`affine.symmetric_scale`)."""
    return tl.minimum(amax * (_EXCESS / top) + _TINY16, _MAX16).to(tl.float16)


@triton.jit
def int8_codes(x, scale):
    """``round(x / scale)`` within ±127."""
    code = round_even(tl.div_rn(x, scale.to(tl.float32)))
    return tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)


@triton.jit
def e4m3_codes(x, scale):
    """``x / scale`` to E4M3, saturating at 448."""
    y = tl.div_rn(x, scale.to(tl.float32))
    return tl.minimum(tl.maximum(y, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def e2m1_codes(x):
    """fp32 to E2M1 codes 0..15 (int32): nearest magnitude, ties to the even code, saturating at 6."""
    a = tl.abs(x)
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32)
    code += (a >= 1.75).to(tl.int32) + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32)
    code += (a > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def nvfp4_block(x, tensor_scale, D: tl.constexpr):
    """Codes (int32 [D]) and E4M3 scales [D / 16] of a row fp32 [D] (`kv_fp4.quantize`)."""
    blocks = tl.reshape(x, [D // 16, 16])
    amax = tl.max(tl.abs(blocks), 1)
    scale = tl.div_rn(amax, amax * 0.0 + 6.0 * tensor_scale)
    scale = tl.minimum(tl.maximum(scale, 0.001953125), 448.0).to(tl.float8e4nv)
    factor = scale.to(tl.float32) * tensor_scale
    codes = e2m1_codes(tl.div_rn(blocks, blocks * 0.0 + factor[:, None]))
    return tl.reshape(codes, [D]), scale


@triton.jit
def towards16(x, UP: tl.constexpr):
    """fp32 to the nearest float16 above (UP) or below, saturating at ±65504 (`affine.round_away16`)."""
    y = tl.minimum(tl.maximum(x, -_MAX16), _MAX16).to(tl.float16)
    bits = y.to(tl.int16, bitcast=True)
    zero = (bits & 0x7FFF) == 0
    if UP:
        moved = tl.where(zero, 1, tl.where(bits > 0, bits + 1, bits - 1))
        short = y.to(tl.float32) < x
    else:
        moved = tl.where(zero, -32767, tl.where(bits > 0, bits - 1, bits + 1))
        short = y.to(tl.float32) > x
    far = moved.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    far = tl.minimum(tl.maximum(far, -_MAX16), _MAX16).to(tl.float16)
    return tl.where(short, far, y)


@triton.jit
def affine(low, high, LEVELS: tl.constexpr):
    """Float16 minimum and step of a grid of LEVELS + 1 points that covers [low, high] (fp32)."""
    minimum = towards16(low, False)
    width = high - minimum.to(tl.float32)
    step = towards16(tl.div_rn(width, width * 0.0 + LEVELS), True)
    return minimum, tl.maximum(step.to(tl.float32), _TINY16).to(tl.float16)


@triton.jit
def affine_codes(x, minimum, step, LEVELS: tl.constexpr):
    """``round((x - minimum) / step)`` within 0 .. LEVELS, as int32; parameters broadcastable to ``x``."""
    offset = x - minimum.to(tl.float32)
    code = round_even(tl.div_rn(offset, offset * 0.0 + step.to(tl.float32)))
    return tl.minimum(tl.maximum(code, 0.0), LEVELS).to(tl.int32)
