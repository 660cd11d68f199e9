"""Losses of draft heads: on the tokens that came, on the target's law, and on acceptance itself.

All take logits [n, V'] over the drafted vocabulary and give one number per row, in nats.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

LossName = Literal["ce", "kl", "hybrid"]
LATE = 2 / 3
"""Share of the training after which *hybrid* turns to acceptance."""


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """-log q(x) for tokens ``ids`` [n]: Medusa-1's loss (arXiv 2401.10774, eq. 1)."""
    return F.cross_entropy(logits, ids, reduction="none")


def divergence(logits: Tensor, law: Tensor) -> Tensor:
    """KL(p || q) for the target's law ``law`` [n, V']: distillation, which needs less text."""
    return F.kl_div(logits.log_softmax(-1), law, reduction="none").sum(-1)


def rejection(logits: Tensor, law: Tensor) -> Tensor:
    """-log Σ min(p, q): the negative logarithm of the acceptance of sampled drafts (Leviathan et al.)."""
    return -torch.minimum(logits.softmax(-1), law).sum(-1).clamp_min(1e-12).log()


def loss_of(name: LossName, logits: Tensor, ids: Tensor, law: Tensor | None, share: float) -> Tensor:
    """The loss ``name`` at a ``share`` of the training, [n]; *ce* needs no law."""
    if name == "ce" or law is None:
        return cross_entropy(logits, ids)
    if name == "hybrid" and share >= LATE:
        return rejection(logits, law)
    return divergence(logits, law)
