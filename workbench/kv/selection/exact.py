"""The precision that scores are formed in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """``x`` in float32, or float64 where it already is."""
    return x if x.dtype == torch.float64 else x.float()
