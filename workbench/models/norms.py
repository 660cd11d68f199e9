"""RMS norm in the two numerics classes (arXiv 1910.07467).

Both compute ``x / sqrt(mean(x^2) + eps) * gain`` over the last axis. The fast form has the fewest
operations; the pinned form avoids the ones whose vector and scalar code round differently and is
run on row tiles (``pinned_rows``), so that a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workbench.models.rowwise import pinned_rows

Norm = Callable[[Tensor], Tensor]


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
