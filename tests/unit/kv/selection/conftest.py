"""Layers of cached tokens, and selectors driven as the engine drives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.engine.selection import CachedLayer, KVSelector, Selection
from workbench.kv import adacurdkv, curdkv, expected_attention, h2o, knorm, snapkv, streaming_llm
from workbench.kv.selection.baseline import RandomConfig, random_selector
from workbench.models.config import ModelConfig
from workbench.spec.technique import make_config

MODULES = {m.SPEC.id: m for m in (adacurdkv, curdkv, expected_attention, h2o, knorm, snapkv, streaming_llm)}


@dataclass
class Tokens:
    """What one layer caches and asks: keys, values [Hkv, S, D], queries [S, Hq, D], positions [S]."""

    keys: Tensor
    values: Tensor
    queries: Tensor

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.keys.shape[1])

    def cached(self, slots: int | None = None) -> CachedLayer:
        """The first ``slots`` tokens as a selector sees them."""
        heads = len(self.keys)
        return CachedLayer(
            self.keys[:, :slots], self.values[:, :slots], self.positions[:slots].expand(heads, -1)
        )

    def observe(self, selection: Selection, chunk: int, start: int = 0, end: int | None = None) -> None:
        """Hand over the queries of layer 0 in chunks."""
        last = self.keys.shape[1] if end is None else end
        for begin in range(start, last, chunk):
            to = min(begin + chunk, last)

            def cached(slots: int = to) -> CachedLayer:
                return self.cached(slots)

            selection.observe(0, self.queries[begin:to], self.positions[begin:to], cached)


def tokens(
    n: int, kv_heads: int = 2, group: int = 2, dim: int = 8, seed: int = 0, dtype: Any = torch.float32
) -> Tokens:
    gen = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=gen).to(dtype)

    return Tokens(
        draw(kv_heads, n, dim), draw(kv_heads, n, dim), draw(n, kv_heads * group, dim) / dim**0.5 * 3
    )


@pytest.fixture(scope="session")
def make_tokens() -> Callable[..., Tokens]:
    return tokens


@pytest.fixture(scope="session")
def model_config() -> ModelConfig:
    """Four query and two KV heads of 8 dimensions, with YaRN, whose attention factor is not 1."""
    return ModelConfig.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 16,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 1024,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
            "rms_norm_eps": 1e-6,
        }
    )


@pytest.fixture(scope="session")
def bind(model_config: ModelConfig) -> Callable[..., KVSelector]:
    """``bind("snapkv", keep=0.25)``; also ``random``."""

    def make(id: str, **options: Any) -> KVSelector:
        if id == "random":
            return random_selector(RandomConfig(**options))
        module = MODULES[id]
        config = make_config(module.Config, options, id)
        return module.bind(config, SimpleNamespace(config=model_config))

    return make
