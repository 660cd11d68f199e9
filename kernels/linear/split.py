"""A product whose K axis is cut into parts: enough programs for few tokens, sums in a fixed order.

A kernel with ``split`` > 1 writes float32 partial tiles below one another, ``rows`` rows a part, whole tiles
high so that no part's tile reaches into the next part. They are then added in the order of the parts and
rounded once: the same input gives the same bits however the device schedules the programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def sum_parts_kernel(parts, y, part_stride, total, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """y = parts[0] + parts[1] + ... in this order: float32 sums, rounded once to y's dtype."""
    where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.load(parts + where, mask=where < total, other=0.0)
    for _ in tl.static_range(1, SPLIT):
        parts += part_stride
        acc += tl.load(parts + where, mask=where < total, other=0.0)
    tl.store(y + where, acc.to(y.dtype.element_ty), mask=where < total)


def choose_split(tiles: int, k: int, processors: int) -> int:
    """Parts of K that give every processor about two tiles, at most 8, each part at least 512 inputs long."""
    return max(1, min(8, 2 * processors // tiles, k // 512))


def partial_rows(m: int, bm: int, split: int) -> int:
    """Rows that one part takes in the workspace: whole tiles of ``bm``, or ``m`` when nothing is split."""
    return m if split == 1 else -(-m // bm) * bm


def add_parts(parts: Tensor, y: Tensor, rows: int, split: int) -> None:
    """Add ``split`` parts of ``rows`` rows of ``parts`` [split * rows, N] float32 into ``y`` [M, N]."""
    total = y.numel()
    sum_parts_kernel[(triton.cdiv(total, 1024),)](parts, y, rows * y.shape[1], total, SPLIT=split, BLOCK=1024)


def workspace(y: Tensor, rows: int, split: int) -> Tensor:
    """Where the parts go: ``y`` itself when nothing is split, else [split * rows, N] float32."""
    if split == 1:
        return y
    return torch.empty(split * rows, y.shape[1], dtype=torch.float32, device=y.device)
