"""What the pinned form computes: tiles of eight rows meet blocks of 64 keys, products of one shape.

Online softmax over blocks in logical order (Dao et al. 2022, alg. 1). A block that a row may not see is an
exact no-op for it (factor 1, weights 0), so tiles of different lengths can share a call. Which rows and keys
meet is told by :mod:`workbench.attention.pinned` and :mod:`workbench.attention.fixed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.attention.tiles import KEYS, ROWS
from workbench.engine.seams import AttentionShape


@dataclass(frozen=True)
class KeyStep:
    """One key block of every tile of a group.

    ``slots`` int64 [n, 64] flat slots; ``aligned``: each row of them is one aligned 64-slot piece of a page.
    ``hidden`` bool [n, 1, 8, 1, 64], ``dead`` bool [n, 1, 64, 1] (hidden from all rows), or None for neither.
    """

    slots: Tensor
    aligned: bool
    hidden: Tensor | None
    dead: Tensor | None


@dataclass(frozen=True)
class Group:
    """Tiles that share their calls, and their key blocks in logical order.

    ``query`` int64 [n * 8]: the rows they read. ``place``, ``rows`` int64 [R]: which result is which row's.
    """

    query: Tensor
    place: Tensor
    rows: Tensor
    steps: tuple[KeyStep, ...]


def _rows_of(pool: Tensor, step: KeyStep, dtype: torch.dtype) -> Tensor:
    """K or V of a step, ``[n, Hkv, 64, D]``, a contiguous copy in ``dtype``."""
    page = pool.shape[2]
    if step.aligned:
        first = step.slots[:, 0]
        out = pool.view(*pool.shape[:2], -1, KEYS, pool.shape[3])[first // page, :, first % page // KEYS]
    else:
        out = pool.permute(0, 2, 1, 3)[step.slots // page, step.slots % page].transpose(1, 2)
    out = out.to(dtype=dtype, memory_format=torch.contiguous_format)
    return out.contiguous()


def run_group(group: Group, shape: AttentionShape, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Results ``[n * 8, Hq * D]`` of a group's tiles; ``q`` [T, Hq, D] in the computing dtype."""
    heads, dim = shape.kv_heads, shape.head_dim
    tall = ROWS * (shape.heads // heads)
    n = len(group.query) // ROWS
    tile = q.index_select(0, group.query).view(n, ROWS, heads, -1, dim).transpose(1, 2)
    # One tile alone would be reshaped to a strided view, for which MKL has another kernel: always packed.
    tile = tile.reshape(n * heads, tall, dim).contiguous()
    top = torch.full((n * heads, tall, 1), float("-inf"), dtype=q.dtype, device=q.device)
    mass, acc = torch.zeros_like(top), torch.zeros_like(tile)
    for step in group.steps:
        keys, values = _rows_of(k, step, q.dtype), _rows_of(v, step, q.dtype)
        if step.dead is not None:
            values.masked_fill_(step.dead, 0.0)
        s = torch.bmm(tile, keys.view(n * heads, -1, dim).transpose(1, 2))
        if shape.soft_cap is not None:
            s = s.div_(shape.soft_cap).tanh_().mul_(shape.soft_cap)
        if step.hidden is not None:
            s.view(n, heads, ROWS, -1, s.shape[-1]).masked_fill_(step.hidden, float("-inf"))
        above = torch.maximum(top, s.amax(-1, keepdim=True))
        safe = above.clamp(min=torch.finfo(q.dtype).min)  # no NaN for rows that saw nothing yet
        p = s.sub_(safe).exp_()
        fade = top.sub_(safe).exp_()
        mass = mass.mul_(fade).add_(p.sum(-1, keepdim=True))
        acc = acc.mul_(fade).add_(torch.bmm(p, values.view(n * heads, -1, dim)))
        top = above
    acc = torch.where(mass == 0, 0.0, acc / mass)  # a NaN that was seen stays one
    return acc.view(n, heads, ROWS, -1, dim).transpose(1, 2).reshape(n * ROWS, -1)


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the calling thread's torch operations on one core; the former number of threads comes back."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
