"""Linears that dequantize: the reference kernels, for every shape, dtype and device.

In 16-bit weight sets the codes stay packed and are dequantized to a float32 workspace of one linear on
every call. In float32 and float64 sets, which exist to be compared with, the dequantized weight itself
is held: those save no memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.packed import LinearFn, PackedLinear, dense, tiled
from workbench.numerics.packing import pack, unpack
from workbench.quant.grid import Grid


def dequantized_dense(grid: Grid, bias: Tensor | None, dtype: torch.dtype, *, pinned: bool) -> PackedLinear:
    """``F.linear`` on the held, dequantized weight in float32 or float64."""
    linear = dense(grid.values(dtype), None if bias is None else bias.to(dtype), pinned=pinned)
    name = f"W{grid.bits} dequantised, {linear.kernel}"
    return PackedLinear(linear.fn, linear.n, linear.k, name, linear.held, linear.opaque_nbytes)


def dequantizing(grid: Grid, bias: Tensor | None, *, pinned: bool) -> PackedLinear:
    """Packed codes, dequantized on every call.

    The rule of all 16-bit weight sets: activations are rounded to bfloat16, products are summed in
    float32, and the sum is rounded to bfloat16.
    """
    n, k = grid.codes.shape
    codes = pack(grid.codes, 4) if grid.bits == 4 else grid.codes

    def matrix() -> Tensor:
        unpacked = unpack(codes, 4, k) if grid.bits == 4 else codes
        return Grid(grid.bits, grid.group, unpacked, grid.step, grid.centre).values()

    fn = rounded(lambda x: F.linear(x, matrix()), bias)
    kernel = f"W{grid.bits} dequantised per call, F.linear fp32"
    if pinned:
        fn, kernel = tiled(fn), f"{kernel}, 8-row tiles"
    held = tuple(t for t in (codes, grid.step, grid.centre, bias) if t is not None)
    return PackedLinear(fn, n, k, kernel, held)


def rounded(multiply: LinearFn, bias: Tensor | None) -> LinearFn:
    """``multiply`` between a rounding of the activations and one of the sums, both to bfloat16.

    ``bias`` is added after the second rounding, in float32.
    """
    low, high = torch.bfloat16, torch.float32

    def run(x: Tensor) -> Tensor:
        out = multiply(x.to(low).to(high)).to(low).to(high)
        return out if bias is None else out.add_(bias)

    return run
