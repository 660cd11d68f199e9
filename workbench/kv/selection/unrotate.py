"""Queries without their rotary embedding, and the average rotation of positions to come.

With the model's own frequencies, every kind; layers that a selector acts in see all keys, so theirs are those
of full attention. Both directions carry the attention factor that some kinds multiply into cosine and sine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.models.config import FULL, ModelConfig
from workbench.models.rope import RopeTable, apply_rope


class Rotation:
    """Rotations of a model's full-attention layers, in float64."""

    def __init__(self, config: ModelConfig) -> None:
        spec = config.rope_of(FULL) if any(name == FULL for name, _ in config.rope) else config.rope[0][1]
        self._limit = config.max_position
        self._factor = spec.attention_factor
        self._table = RopeTable(spec, config.head_dim, self._limit, torch.float64)

    def undo(self, queries: Tensor, positions: Tensor) -> Tensor:
        """Queries [n, Hq, D] rotated to int64 ``positions`` [n], as they were before: float64."""
        at = positions.cpu()
        cos, sin = self._table.gather(at, int(at.max()) if len(at) else 0)
        inverse = 1 / self._factor**2
        turn = [(t[:, None] * inverse).to(queries.device) for t in (cos, -sin)]
        return apply_rope(queries.double(), *turn)

    def ahead(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Mean cosines and signed sines, float64 [D] each, of ``count`` positions from ``start`` on.

        Positions the model does not have are left out (the last one it has always counts).
        """
        first = min(start, self._limit - 1)
        at = torch.arange(first, min(max(start + count, first + 1), self._limit))
        cos, sin = self._table.gather(at, int(at[-1]))
        return cos.mean(0), sin.mean(0)
