"""A small model's joint rows, correlated across layers and heads, and a calibration of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from workbench.kv.cached import CachedRows
from workbench.kv.kvtc.artefact import Calibration
from workbench.kv.kvtc.basis import Moments
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.cross import CrossMoments
from workbench.kv.kvtc.distortion import measure
from workbench.kv.kvtc.joint import JointRows
from workbench.models.config import ModelConfig

HEADS, DIM, SINKS = 2, 16, 4
Make = Callable[..., CachedRows]


def config(layers: int = 3, sliding: bool = False) -> ModelConfig:
    hf = {
        "model_type": "gemma3_text" if sliding else "llama",
        "vocab_size": 8,
        "hidden_size": 64,
        "intermediate_size": 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    if sliding:
        types = ["sliding_attention", "full_attention"] * layers
        hf |= {"sliding_window": 24, "layer_types": types[:layers], "query_pre_attn_scalar": DIM}
    return ModelConfig.from_hf(hf)


def rows_of(joint: JointRows, tokens: int, seed: int = 0, first: int = 0) -> CachedRows:
    """Keys and values driven by few common directions; the first tokens are far larger (sinks)."""
    shared = torch.Generator().manual_seed(99)
    gen = torch.Generator().manual_seed(seed)
    shape = (joint.num_layers, joint.heads, joint.dim)
    positions = torch.arange(first, first + tokens)
    out = []
    for _ in range(2):
        directions = (
            torch.randn(6, *shape, generator=shared) * torch.tensor([8, 4, 3, 2, 1, 1.0])[:, None, None, None]
        )
        x = torch.einsum("tc,clhd->tlhd", torch.randn(tokens, 6, generator=gen), directions)
        x = x + 0.2 * torch.randn(tokens, *shape, generator=gen) + directions[0] / 4
        x[positions < SINKS] *= 40
        out.append(x)
    k = tuple(joint.rotate(out[0][:, i], positions) for i in range(joint.num_layers))
    return CachedRows(k, tuple(out[1][:, i].contiguous() for i in range(joint.num_layers)), positions)


def calibrate(joint: JointRows, model: str = "model") -> Calibration:
    sides = []
    moments = [Moments(joint.features) for _ in range(2)]
    held: list[list[torch.Tensor]] = [[], []]
    for seed in range(100, 106):
        rows = rows_of(joint, 64, seed)
        flats = joint.keys(rows.k, rows.positions), joint.values(rows.v)
        for m, h, flat in zip(moments, held, flats, strict=True):
            m.add(flat[SINKS:])
            h.append(flat[SINKS:])
    for m, h in zip(moments, held, strict=True):
        basis = m.basis(joint.features)
        sides.append((basis, measure(basis.project(torch.cat(h)))))
    cross = CrossMoments(sides[0][0], sides[1][0])
    cross.add(*(torch.cat(h) for h in held))
    return Calibration(sides[0], sides[1], cross.cross(), model, joint.key, "synthetic rows", 6 * 60)


@pytest.fixture(scope="session")
def joint() -> JointRows:
    return JointRows(config())


@pytest.fixture(scope="session")
def make_joint() -> Callable[..., JointRows]:
    return lambda *args, **kwargs: JointRows(config(*args, **kwargs))


@pytest.fixture(scope="session")
def make_rows() -> Make:
    return rows_of


@pytest.fixture(scope="session")
def make_calibration() -> Callable[..., Calibration]:
    return calibrate


@pytest.fixture(scope="session")
def calibration(joint: JointRows) -> Calibration:
    return calibrate(joint)


@pytest.fixture(scope="session")
def make_codec(joint: JointRows, calibration: Calibration) -> Callable[..., Kvtc]:
    def make(ratio: float = 6, **options: object) -> Kvtc:
        options = {"sinks": SINKS, "window": 32} | options
        return Kvtc(calibration.artefact(ratio, ratio), joint, "model", **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def make_config() -> Callable[..., ModelConfig]:
    return config
