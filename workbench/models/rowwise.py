"""Row-wise operations whose bits do not depend on how many rows are computed together.

ATen's CPU loops split large tensors between threads at element boundaries, and the last elements of
a piece take scalar code whose exp, erf and tanh round differently from the vector code. Tensors
small enough to stay on one thread are walked row by row, so tiles of few rows remove the effect.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SERIAL = 32_767
"""Most elements an elementwise loop or reduction keeps on one thread (ATen's GRAIN_SIZE - 1)."""


def pinned_rows(fn: Callable[[Tensor], Tensor], x: Tensor, serial: int = SERIAL) -> Tensor:
    """Apply a row-wise ``fn`` to ``x`` [T, ...], at most ``serial`` elements (or one row) at a time."""
    rows = max(1, serial // max(1, x.shape[1:].numel()))
    if x.shape[0] <= rows:
        return fn(x)
    return torch.cat([fn(tile) for tile in torch.split(x, rows)])
