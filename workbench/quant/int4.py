"""W4A16 on torch's int4pack kernel, and the same codes dequantized for long prompts.

The kernel multiplies bfloat16 activations with ``(code - 8) * step + centre`` in float32 and rounds the
sum to bfloat16; rows are bit-equal whatever their number. Its time grows with the rows, so from
``LONG`` rows on the codes are dequantized once per call, to exactly the float32 values the kernel uses
(bfloat16 weights would be faster, but other weights), and multiplied by oneDNN in float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from workbench.models.packed import PackedLinear
from workbench.quant.dequantized import rounded
from workbench.quant.grid import Grid

LONG = 128
"""Rows from which dequantizing pays; measured at 576 to 3072 outputs: even at 64 rows, 1.3x at 512."""
_GROUPS = (32, 64, 128, 256)
_ROWS = 64  # rows of one block of the AVX-512 layout


def kernel_group(grid: Grid) -> int | None:
    """The group size to run the kernel with, or None when it cannot hold the grid.

    A group that is a multiple of a kernel group is run as several equal ones.
    """
    n, k = grid.codes.shape
    if grid.bits != 4 or n % 16 or k % grid.group:
        return None
    return next((g for g in reversed(_GROUPS) if grid.group % g == 0), None)


def int4pack(grid: Grid, group: int, bias: Tensor | None, *, pinned: bool) -> PackedLinear:
    """The linear of a 4-bit grid; ``group`` comes from :func:`kernel_group`."""
    n, k = grid.codes.shape
    centre = torch.zeros_like(grid.step) if grid.centre is None else grid.centre
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(grid.codes.to(torch.int32), 1)
    pair = torch.stack((grid.step, centre), 2).repeat_interleave(grid.group // group, 1)
    parameters = pair.transpose(0, 1).contiguous()  # [groups, n, 2]
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    low, high = torch.bfloat16, torch.float32

    def short(x: Tensor) -> Tensor:
        out: Tensor = multiply(x.to(low), packed, group, parameters).to(high)
        return out if bias is None else out.add_(bias)

    held = tuple(t for t in (packed, parameters, bias) if t is not None)
    if pinned or n % _ROWS or not layout_is_known() or not torch._C._has_mkldnn:
        return PackedLinear(short, n, k, "int4pack", held)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def dense(x: Tensor) -> Tensor:
        weight = dequantize(packed, parameters, n, k)
        out: Tensor = pointwise(x, weight.t(), None, "none", [], "")
        return out

    long = rounded(dense, bias)

    def fn(x: Tensor) -> Tensor:
        return short(x) if x.shape[0] < LONG else long(x)

    return PackedLinear(fn, n, k, f"int4pack, from {LONG} rows dequantised oneDNN fp32", held)


def dequantize(packed: Tensor, parameters: Tensor, n: int, k: int) -> Tensor:
    """The kernel's own float32 values, transposed: [k, n].

    In the AVX-512 layout a block of 64 rows holds, for each input, 32 bytes: rows 0..31 in the low
    nibbles and 32..63 in the high ones.
    """
    block = packed.view(n // _ROWS, k, _ROWS // 2)
    out = torch.empty(k, n)
    split = out.view(k, n // _ROWS, 2, _ROWS // 2)
    split[:, :, 0] = (block & 15).transpose(0, 1)
    split[:, :, 1] = (block >> 4).transpose(0, 1)
    step, centre = parameters.float().unbind(2)
    grouped = out.view(parameters.shape[0], -1, n)
    # code * step - 8 * step would round twice; the codes are made signed first.
    grouped.sub_(8).mul_(step[:, None]).add_(centre[:, None])
    return out


@cache
def layout_is_known() -> bool:
    """Whether this CPU's packed layout is the one :func:`dequantize` reads, found out with a probe."""
    codes = torch.arange(2 * _ROWS * 32, dtype=torch.int32).mul(7).remainder(16).view(2 * _ROWS, 32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    ones = torch.tensor([1.0, 8.0], dtype=torch.bfloat16).expand(1, 2 * _ROWS, 2)
    return bool(torch.equal(dequantize(packed, ones, 2 * _ROWS, 32).t(), codes.float()))
