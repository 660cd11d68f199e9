"""Keeping tokens at random: what every selector has to beat, and no technique of the catalogue."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.engine.selection import CachedLayer
from workbench.kv.selection.rules import AWARE, Rules
from workbench.kv.selection.selector import Selector, cache_only


@dataclass(frozen=True)
class RandomConfig:
    """As of a technique; equal seeds keep the same slots."""

    keep: float = 0.5
    sinks: int = 4
    recent: int = 0
    protocol: str = AWARE
    seed: int = 0


def random_selector(config: RandomConfig | None = None) -> Selector:
    """A selector with independent uniform scores per layer, head and slot."""
    made = config or RandomConfig()

    def score(layer: int, cached: CachedLayer) -> Tensor:
        draw = torch.Generator().manual_seed((made.seed << 20) + layer)
        return torch.rand(cached.positions.shape, generator=draw, dtype=torch.float32).to(cached.keys.device)

    return cache_only("random", made, Rules.of(made), score)
