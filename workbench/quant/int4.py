"""W4A16 on torch's int4pack kernel, for every row count.

The kernel multiplies bfloat16 activations with ``(code - 8) * step + centre``, unrounded, in float32, and
rounds the sum to bfloat16; rows are bit-equal whatever their number, so both numerics classes use it.
Its time grows with the rows: it halves the 16-bit kernel's at one row, meets it near 16, and takes 2.5
times as long in a 512-row prefill. A bfloat16 GEMM there would compute with other weights (the values
need more than 8 bits), and dequantizing to float32 per call was measured to gain less than a tenth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.models.packed import PackedLinear
from workbench.quant.grid import Grid

_GROUPS = (256, 128, 64, 32)


def kernel_group(grid: Grid) -> int | None:
    """The group size to run the kernel with, or None when it cannot hold the grid.

    A group that is a multiple of a kernel group is run as several equal ones.
    """
    n, k = grid.codes.shape
    if grid.bits != 4 or n % 16 or k % grid.group:
        return None
    return next((g for g in _GROUPS if grid.group % g == 0), None)


def int4pack(grid: Grid, group: int, bias: Tensor | None) -> PackedLinear:
    """The linear of a 4-bit grid; ``group`` comes from :func:`kernel_group`, ``bias`` is float32."""
    n, k = grid.codes.shape
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(grid.codes.to(torch.int32), 1)
    centre = torch.zeros_like(grid.step) if grid.centre is None else grid.centre
    pair = torch.stack((grid.step, centre), 2).repeat_interleave(grid.group // group, 1)
    parameters = pair.transpose(0, 1).contiguous()  # [groups, n, 2]
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu.default
    low, high = torch.bfloat16, torch.float32

    def fn(x: Tensor) -> Tensor:
        out: Tensor = multiply(x.to(low), packed, group, parameters).to(high)
        return out if bias is None else out.add_(bias)

    held = tuple(t for t in (packed, parameters, bias) if t is not None)
    return PackedLinear(fn, n, k, "int4pack", held)
