"""Where a step's rows go, worked out once for all layers.

Head-major pages scatter one token's heads over a page, so slots become one row index per token and head.
Every layer of a step writes the same slots: the last index is kept and recognised by its tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RowIndex:
    """Rows of a plane ``[N, Hkv, P, ...]`` seen as ``[N * Hkv * P, ...]``; not shared between threads."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, int, Tensor] | None = None

    def __call__(self, slots: Tensor, heads: int, size: int) -> Tensor:
        """int64 ``[T * heads]`` rows of ``slots`` int64 [T], token by token, head by head."""
        last = self._last
        if last is not None and last[0] is slots and last[1:3] == (heads, size):
            return last[3]
        first = slots // size * (heads * size) + slots % size
        rows = (first[:, None] + torch.arange(heads, device=slots.device) * size).flatten()
        self._last = (slots, heads, size, rows)
        return rows
