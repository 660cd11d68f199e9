"""The order of tokens inside 16 that lets P go from the score accumulator straight into an FP8 product.

On Hopper a thread of a warpgroup holds columns ``16j + 8h + 2t + e`` of the float32 score tile (t = lane %
4), but an 8-bit A operand from registers wants columns ``16j + 4t + 2h + e`` there. Storing V^T with token
``16j + 8h + 2t + e`` at column ``16j + 4t + 2h + e`` makes the two the same registers, and removes every
shuffle and byte permute between softmax and the second product. FlashAttention-3 (arXiv 2407.08608, section
3.3) permutes inside the kernel; here it is done once, by whoever writes the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.spec.errors import UnsupportedInput

BLOCK = 16


def columns() -> list[int]:
    """``columns()[token] = column`` for the 16 tokens of a block."""
    found = [0] * BLOCK
    for h in range(2):
        for t in range(4):
            for e in range(2):
                found[8 * h + 2 * t + e] = 4 * t + 2 * h + e
    return found


def permute(x: Tensor, dim: int = -1) -> Tensor:
    """Tokens along ``dim`` in the order above; raises ``UnsupportedInput`` unless 16 divides their number."""
    return _ordered(x, dim, torch.argsort(torch.tensor(columns())))


def restore(x: Tensor, dim: int = -1) -> Tensor:
    """The inverse of :func:`permute`."""
    return _ordered(x, dim, torch.tensor(columns()))


def _ordered(x: Tensor, dim: int, order: Tensor) -> Tensor:
    size = x.shape[dim]
    if size % BLOCK:
        raise UnsupportedInput(
            f"Tokens are permuted in blocks of {BLOCK}; {size} is no multiple of it.",
            hint="Pad the tokens to a multiple of 16.",
        )
    index = (torch.arange(0, size, BLOCK)[:, None] + order).flatten().to(x.device)
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8).index_select(dim, index).view(x.dtype)
    return x.index_select(dim, index)
