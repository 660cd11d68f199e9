"""RMS norm in the two numerics classes (arXiv 1910.07467).

Both compute ``x / sqrt(mean(x^2) + eps) * gain`` over the last axis. The fast form has the fewest
operations; the pinned form avoids the ones whose vector and scalar code round differently and is
run on row tiles (``pinned_rows``), so that a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Norm = Callable[[Tensor], Tensor]

_SERIAL = 32_767  # largest tensor ATen's CPU loops never split between threads (GRAIN_SIZE is 32768)


def fast_norm(gain: Tensor, eps: float) -> Norm:
    """Norm over the last axis with ``gain`` [..., width]; four operations.

    ``|x| / sqrt(width)`` is the root mean square, so eps enters as the other leg of a right angle.
    """
    width = gain.shape[-1]
    floor = gain.new_tensor((width * eps) ** 0.5)
    scaled: Tensor = gain * width**0.5
    vector_norm = torch.linalg.vector_norm

    def norm(x: Tensor) -> Tensor:
        length: Tensor = vector_norm(x, dim=-1, keepdim=True)
        return (x * scaled).div_(length.hypot_(floor))

    return norm


def pinned_norm(gain: Tensor, eps: float) -> Norm:
    """The same norm, row by row the same bits whatever the number of rows."""

    def tile(x: Tensor) -> Tensor:
        scale = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (x * scale).mul_(gain)

    def norm(x: Tensor) -> Tensor:
        return pinned_rows(tile, x)

    return norm


def pinned_rows(fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a row-wise ``fn`` to as many rows of ``x`` [T, ...] at a time as one thread handles alone.

    Larger tensors are split between threads at element boundaries, and an element at the end of a
    piece takes the scalar code path: its last bit would depend on how many rows came with it.
    """
    rows = max(1, _SERIAL // max(1, x[0].numel()))
    if x.shape[0] <= rows:
        return fn(x)
    return torch.cat([fn(tile) for tile in torch.split(x, rows)])


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product: ``silu(gate) * up`` of the fused [T, 2F], giving [T, F]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """GeGLU with the exact error function."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """GeGLU with the tanh approximation (Gemma)."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


GATED = {"silu": silu_mul, "gelu": gelu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}
