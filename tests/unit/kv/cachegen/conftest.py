"""A small model's rows, with channels of unlike width, and tables counted on rows of the same kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from workbench.kv.cached import CachedRows
from workbench.kv.cachegen.artefact import Artefact
from workbench.kv.cachegen.calibrate import TableRecorder
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import DELTA_LEVELS, LEVELS, alphabets
from workbench.models.config import ModelConfig

HEADS, DIM = 2, 16
Make = Callable[..., CachedRows]


def layout_of(layers: int = 3, sliding: bool = False, theta: float = 10_000.0, limit: int = 512) -> Layout:
    hf = {
        "model_type": "gemma3_text" if sliding else "llama",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "max_position_embeddings": limit,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": theta,
    }
    if sliding:
        types = ["sliding_attention", "full_attention"] * layers
        hf |= {"sliding_window": 24, "layer_types": types[:layers], "query_pre_attn_scalar": DIM}
    return Layout(ModelConfig.from_hf(hf))


def rows_of(
    tokens: int, seed: int = 0, first: int = 0, layers: int = 3, dtype: torch.dtype = torch.float32
) -> CachedRows:
    """Neighbouring tokens are alike; channels differ in width and mean; the first token is far larger."""
    gen = torch.Generator().manual_seed(seed)
    width = torch.logspace(-1.5, 0.5, HEADS * DIM).view(HEADS, DIM)
    sides: list[tuple[torch.Tensor, ...]] = []
    for _ in range(2):
        out = []
        for layer in range(layers):
            noise = torch.randn(tokens, HEADS, DIM, generator=gen)
            slow = torch.randn(tokens // 8 + 1, HEADS, DIM, generator=gen).repeat_interleave(8, 0)[:tokens]
            x = (0.6 * noise + slow + 0.5) * width * (1 + layer)
            if first == 0:
                x[:1] *= 30
            out.append(x.to(dtype))
        sides.append(tuple(out))
    return CachedRows(sides[0], sides[1], torch.arange(first, first + tokens))


def calibrate(layout: Layout, model: str = "model") -> Artefact:
    recorder = TableRecorder(layout, alphabets(LEVELS + DELTA_LEVELS))
    for seed in range(100, 110):
        rows = rows_of(100, seed, layers=layout.layers)
        for layer in range(layout.layers):
            recorder.add(layer, rows.k[layer], rows.v[layer])
    return recorder.artefact(model, "synthetic rows")


@pytest.fixture(scope="session")
def make_layout() -> Callable[..., Layout]:
    return layout_of


@pytest.fixture(scope="session")
def make_rows() -> Make:
    return rows_of


@pytest.fixture(scope="session")
def make_artefact() -> Callable[..., Artefact]:
    return calibrate


@pytest.fixture(scope="session")
def layout() -> Layout:
    return layout_of()


@pytest.fixture(scope="session")
def artefact(layout: Layout) -> Artefact:
    return calibrate(layout)


@pytest.fixture(scope="session")
def codec(artefact: Artefact, layout: Layout) -> CacheGen:
    return CacheGen(artefact, layout, "model")


@pytest.fixture(params=LEVELS + DELTA_LEVELS, ids=lambda level: level.name)
def level(request: pytest.FixtureRequest) -> object:
    return request.param
