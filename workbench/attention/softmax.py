"""Softmax weights of the fast form: soft-cap, mask, normalise.

torch's CPU and CUDA softmax of half-precision input computes in float32 and rounds once at the end, so a
conversion pass before and after would change nothing but the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.engine.seams import AttentionShape


def weights(s: Tensor, hidden: Tensor | None, edge: int, shape: AttentionShape) -> Tensor:
    """Weights over the last axis in ``s``'s dtype; ``s`` is overwritten.

    ``hidden`` bool, broadcastable to ``s[..., edge:]``: slots that get weight 0 whatever their score is, NaN
    included. Only a window below 1 can hide a row's own slot; such rows get all zeros.
    """
    dtype = s.dtype
    if shape.soft_cap is not None:
        s = s.to(torch.promote_types(dtype, torch.float32))
        s = s.div_(shape.soft_cap).tanh_().mul_(shape.soft_cap)
    if hidden is not None:
        s[..., edge:].masked_fill_(hidden, float("-inf"))
    w = torch.softmax(s, -1).to(dtype)
    if hidden is not None and shape.window is not None and shape.window < 1:
        w[..., edge:].masked_fill_(hidden, 0.0)
    return w
