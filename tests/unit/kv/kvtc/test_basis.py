"""Joint rows and their basis: rotation undone exactly, moments exact, components orthonormal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from workbench.kv.kvtc.basis import Moments
from workbench.kv.kvtc.joint import JointRows
from workbench.models.rope_spec import rope_spec
from workbench.spec.errors import InvariantError, UnsupportedModel, WrongShape

ROPES = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i for i in range(8)],
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_undoing_and_redoing_the_rotation_is_the_identity(make_config, kind):
    base = make_config(2)
    config = replace(base, rope=((base.rope[0][0], rope_spec(ROPES[kind], 1e5, 512, base.head_dim)),))
    joint = JointRows(config)
    positions = torch.tensor([0, 1, 7, 130, 509])
    k = [torch.randn(5, joint.heads, joint.dim) for _ in range(2)]
    flat = joint.keys(k, positions)
    for layer in range(2):
        back = joint.rotate(flat[:, joint.columns(layer)].view(5, joint.heads, joint.dim), positions)
        assert float((back - k[layer]).abs().max()) < 1e-5
    turned = joint.keys([joint.rotate(x, positions) for x in k], positions)
    assert float((turned - joint.values(k)).abs().max()) < 1e-5


def test_the_phase_of_every_setting_is_part_of_the_identity(make_config):
    base = make_config(2)
    keys = {
        JointRows(replace(base, rope=((base.rope[0][0], rope_spec(r, t, 512, base.head_dim)),))).key
        for r in ROPES.values()
        for t in (1e4, 1e5)
    }
    assert len(keys) == 2 * len(ROPES)
    assert JointRows(base).key != JointRows(make_config(3)).key


def test_a_model_of_sliding_layers_only_is_refused(make_config):
    config = make_config(1, sliding=True)
    with pytest.raises(UnsupportedModel, match="sliding"):
        JointRows(config)


def test_rows_of_another_shape_are_refused(joint):
    good = torch.zeros(5, joint.heads, joint.dim)
    with pytest.raises(WrongShape, match="2 layers"):
        joint.values([good, good])
    with pytest.raises(WrongShape, match="Layer 2"):
        joint.values([good, good, good[:, :1]])


def test_streamed_moments_are_those_of_all_rows():
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(300, 1100, generator=gen) * torch.logspace(1, -2, 1100) + 50
    moments = Moments(1100)
    for piece in x.split(77):
        moments.add(piece)
    basis = moments.basis(40)
    assert moments.rows == 300 and torch.allclose(basis.mean, x.mean(0), atol=1e-4)
    want = torch.linalg.svdvals((x - x.mean(0)).double())[:40].square() / 300
    assert torch.allclose(basis.variance, want, rtol=1e-6)
    assert basis.total == pytest.approx(float((x - x.mean(0)).double().square().sum() / 300), rel=1e-6)
    held = basis.project(x).double().square().mean(0)
    assert torch.allclose(held, want, rtol=5e-3)


def test_components_are_orthonormal_up_to_16_bits(calibration):
    for basis, _ in (calibration.k, calibration.v):
        gram = basis.components.double() @ basis.components.double().T
        assert float((gram - torch.eye(basis.rank)).abs().max()) < 2e-3
        assert bool((basis.variance.diff() <= 0).all()) and basis.rank_for(1.0) <= basis.rank + 1
        assert basis.rank_for(0.5) <= basis.rank_for(0.9) < basis.rank


def test_a_basis_per_head_or_layer_holds_less_with_equal_rank(joint, make_rows):
    moments = Moments(joint.features)
    for seed in range(4):
        moments.add(joint.values(make_rows(joint, 64, seed).v)[4:])
    held = [float(moments.basis(6, block).variance.sum()) for block in (joint.dim, joint.width, None)]
    assert held[0] < held[1] < held[2]


def test_no_rows_no_basis():
    with pytest.raises(InvariantError):
        Moments(3).basis(2)
