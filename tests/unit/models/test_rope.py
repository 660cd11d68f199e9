"""Rotary frequencies and tables against transformers' formulas and float64."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from workbench.models.config import FULL, ModelConfig
from workbench.models.rope import RopeTable, apply_rope, frequencies
from workbench.models.rope_spec import RopeSpec
from workbench.spec.errors import PromptTooLong

D, ORIGINAL = 64, 512
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "short_factor": [1.0 + i / 100 for i in range(D // 2)],
        "long_factor": [2.0 + i / 10 for i in range(D // 2)],
        "original_max_position_embeddings": ORIGINAL,
    },
}


def llama(name, max_position):
    rope = {"rope_type": name, "rope_theta": 10_000.0, **SCALINGS[name]}
    return LlamaConfig(
        hidden_size=4 * D, num_attention_heads=4, max_position_embeddings=max_position, rope_parameters=rope
    )


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_agrees_with_transformers(name):
    theirs = llama(name, ORIGINAL if name in ("dynamic", "linear") else 8 * ORIGINAL)
    ours = ModelConfig.from_hf(theirs.to_dict())
    length = ours.max_position
    expected, scale = ROPE_INIT_FUNCTIONS[theirs.rope_parameters["rope_type"]](theirs, seq_len=length)
    got = frequencies(ours.rope_of(FULL), D, length)
    # transformers works in float32: a few units in its last place.
    assert torch.allclose(got, expected.double(), rtol=1e-6, atol=0)
    assert math.isclose(ours.rope_of(FULL).attention_factor, scale, rel_tol=1e-12)


def test_dynamic_ntk_is_plain_up_to_the_original_context_and_stretches_when_extended():
    config = ModelConfig.from_hf(llama("dynamic", ORIGINAL).to_dict())
    plain = frequencies(RopeSpec(), D, ORIGINAL)
    assert torch.equal(frequencies(config.rope_of(FULL), D, ORIGINAL), plain)
    extended = config.with_max_position(3 * ORIGINAL)
    got = frequencies(extended.rope_of(FULL), D, extended.max_position)
    theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](llama("dynamic", ORIGINAL), seq_len=3 * ORIGINAL)
    assert torch.allclose(got, theirs.double(), rtol=1e-6, atol=0)


def test_longrope_is_short_within_the_original_context():
    config = ModelConfig.from_hf(llama("longrope", 8 * ORIGINAL).to_dict()).with_max_position(ORIGINAL)
    got = frequencies(config.rope_of(FULL), D, config.max_position)
    short = torch.tensor(SCALINGS["longrope"]["short_factor"], dtype=torch.float64)
    assert torch.allclose(got, frequencies(RopeSpec(), D, ORIGINAL) / short, rtol=1e-15, atol=0)
    assert config.rope_of(FULL).attention_factor == math.sqrt(1 + math.log(8) / math.log(ORIGINAL))


def test_att_11_phases_are_exact_whatever_the_model_dtype():
    """cos(15962), frequency 1.0, D=128: rounding the position to bfloat16 gives -0.2680."""
    limit = 32_768
    table = RopeTable(RopeSpec(), 128, limit, torch.float32)
    cos, sin = table.gather(torch.arange(limit), limit - 1)
    assert cos[15_962, 0].item() == pytest.approx(-0.9080, abs=5e-4)
    angles = torch.arange(limit, dtype=torch.float64)[:, None] * frequencies(RopeSpec(), 128, limit)
    assert (cos[:, :64].double() - angles.cos()).abs().max() <= 2**-24
    assert (sin[:, 64:].double() - angles.sin()).abs().max() <= 2**-24


def test_tables_grow_without_changing_what_they_held():
    table = RopeTable(RopeSpec(), 8, 10_000, torch.float64)
    positions = torch.tensor([0, 3, 200])
    before = [t.clone() for t in table.gather(positions, 200)]
    small = table.nbytes
    table.gather(torch.tensor([9_999]), 9_999)
    after = table.gather(positions, 200)
    assert table.nbytes > small
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_positions_beyond_the_limit_are_refused():
    table = RopeTable(RopeSpec(), 8, 16, torch.float32)
    with pytest.raises(PromptTooLong, match="16"):
        table.gather(torch.tensor([16]), 16)


def test_rotation_is_the_complex_product():
    torch.manual_seed(0)
    table = RopeTable(RopeSpec(), 8, 64, torch.float64)
    x = torch.randn(5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 7, 33, 63])
    cos, sin = table.gather(positions, 63)
    got = apply_rope(x, cos[:, None], sin[:, None])
    turn = torch.polar(
        torch.ones(5, 4, dtype=torch.float64), positions[:, None] * frequencies(RopeSpec(), 8, 64)
    )
    expected = torch.complex(x[..., :4], x[..., 4:]) * turn[:, None]
    assert torch.allclose(got, torch.cat((expected.real, expected.imag), -1), rtol=0, atol=1e-14)
