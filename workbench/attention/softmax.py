"""Softmax weights of the fast form: soft-cap, mask, normalise.

torch's CPU and CUDA softmax of half-precision input computes in float32 and rounds once at the end, so a
conversion pass before and after would change nothing but the time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.engine.seams import AttentionShape


def weights(s: Tensor, hide: Tensor | None, edge: int, shape: AttentionShape) -> Tensor:
    """Weights over the last axis in ``s``'s dtype; ``s`` is overwritten.

    ``hide``, broadcastable to ``s[..., edge:]``, names slots that get weight 0. As bool it does so whatever
    their score is, NaN included; as a float tensor of 0 and -inf it is added, which is three times as fast
    and needs finite scores. Only a window below 1 can hide a row's own slot; such rows get all zeros.
    """
    dtype = s.dtype
    if shape.soft_cap is not None:
        s = s.to(torch.promote_types(dtype, torch.float32))
        s = s.div_(shape.soft_cap).tanh_().mul_(shape.soft_cap)
    if hide is not None:
        tail = s[..., edge:]
        if hide.dtype is torch.bool:
            tail.masked_fill_(hide, float("-inf"))
        else:
            tail.add_(hide)
    w = torch.softmax(s, -1).to(dtype)
    if hide is not None and shape.window is not None and shape.window < 1:
        w[..., edge:].masked_fill_(hide != 0, 0.0)
    return w
