"""W4A16 on the workbench's own kernel: the grid's codes stay packed and meet 16-bit activations on the GPU.

The same values as every other kernel of the weight set, ``(code - 8) * step + centre``: codes are exact in
the tensor core, steps and centres enter in float32, and the sum is rounded to bfloat16 once. Chosen when the
weights are packed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kernels import dispatch, target
from workbench.kernels.layouts.w4 import pack_w4
from workbench.models.packed import PackedLinear
from workbench.quant.grid import Grid

_ALIGN = 8
"""Inputs and outputs a row must be a multiple of: 16 bytes of bfloat16, what TMA can address."""


def kernel_linear(grid: Grid, bias: Tensor | None, *, pinned: bool) -> PackedLinear | None:
    """The linear of a 4-bit grid on the device of its codes, or None where the kernel cannot hold or run it.

    ``bias`` is float32. Not for the pinned class: the kernel's tiles follow the number of rows.
    """
    n, k = grid.codes.shape
    if pinned or grid.bits != 4 or grid.group % 16 or n % _ALIGN or k % _ALIGN:
        return None
    choice = dispatch.choose("w4a16", target.probe(grid.codes.device), dtype=torch.bfloat16)
    if not choice.runs:
        return None
    from workbench.kernels.linear.w4a16 import w4a16

    weight = pack_w4(grid.codes, grid.step, centres=grid.centre, group=grid.group)
    low, high = torch.bfloat16, torch.float32

    def fn(x: Tensor) -> Tensor:
        out = w4a16(x.to(low), weight).to(high)
        return out if bias is None else out.add_(bias)

    held = tuple(t for t in (weight.codes, weight.scales, weight.centres, bias) if t is not None)
    return PackedLinear(fn, n, k, f"{choice.kernel} {choice.path}", held)
