"""4- and 8-bit grids for the compiled kernels: the same values, one kernel for every row count.

Codes are unpacked to bfloat16 (which holds them exactly) in the first-level cache; the sum over a group is
that of activations and codes, so the value ``code * step + centre`` is never rounded. Sums are rounded to
bfloat16 before the bias, as by the other kernels of these grids.
"""

from __future__ import annotations

from ctypes import CDLL

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.kernels.cpu.library import COLUMNS
from workbench.models.compiled import LOW, gated_fn, held, native_linear, plain_fn, taking_turns
from workbench.models.packed import PackedLinear
from workbench.models.weightset import GATE_UP
from workbench.quant.grid import Grid


def fits(grid: Grid) -> bool:
    """Whether the kernels hold the grid: whole groups of an even number of inputs."""
    k = grid.codes.shape[1]
    return grid.group % 2 == 0 and k % grid.group == 0 and (grid.bits == 4) == (grid.centre is not None)


def coded_linear(lib: CDLL, grid: Grid, bias: Tensor | None, name: str, activation: str) -> PackedLinear:
    """The linear of a grid that :func:`fits`; gate and up rows come with activation and product."""
    n, k = grid.codes.shape
    gated = name.endswith(GATE_UP)
    native = native_linear(lib, coded_panels(grid, gated=gated), bias, n, k, grid.bits, grid.group)
    kernel = f"compiled W{grid.bits}"
    if gated:
        fn, kernel = gated_fn(native, activation), f"{kernel}, {activation}"
        return PackedLinear(fn, n, k, kernel, held(native), gated=True, native=native)
    bare = native_linear(lib, native.panels, None, n, k, grid.bits, grid.group)
    sums = plain_fn(bare)

    def fn_rounded(x: Tensor) -> Tensor:
        out = sums(x).to(LOW).to(torch.float32)
        return out if bias is None else out.add_(bias)

    return PackedLinear(fn_rounded, n, k, kernel, held(native), native=native)


def coded_panels(grid: Grid, *, gated: bool = False) -> Tensor:
    """uint8 [panels, groups, bytes]: per group of 32 columns steps, centres (4 bits), codes of input pairs.

    ``gated``: blocks of 32 gate and up rows take turns. Columns that fill the last panel have step 0.
    """
    codes, groups = grid.codes.view(torch.uint8), grid.step.shape[1]
    parameters = [grid.step] if grid.centre is None else [grid.step, grid.centre]
    if gated:
        codes, parameters = taking_turns(codes), [taking_turns(p) for p in parameters]
    rows = -len(codes) % COLUMNS
    codes, parameters = F.pad(codes, (0, 0, 0, rows)), [F.pad(p, (0, 0, 0, rows)) for p in parameters]
    panels = len(codes) // COLUMNS
    heads = [
        p.view(panels, COLUMNS, groups).transpose(1, 2).contiguous().view(torch.uint8) for p in parameters
    ]
    pairs = codes.view(panels, COLUMNS, groups, grid.group // 2, 2).permute(0, 2, 3, 1, 4).contiguous()
    if grid.bits == 4:  # column c in the low nibble, column c + 16 in the high one
        low, high = pairs.view(panels, groups, -1, 2, COLUMNS).unbind(3)
        pairs = low | high << 4
    return torch.cat((*heads, pairs.reshape(panels, groups, -1)), 2).contiguous()
