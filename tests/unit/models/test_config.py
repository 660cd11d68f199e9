"""Configurations of every family, in the spellings checkpoints use."""

import dataclasses

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from workbench.models.config import FULL, SLIDING, KVGroup, ModelConfig
from workbench.models.rope import frequencies
from workbench.spec.errors import UnsupportedModel

LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Gemma3TextConfig])
def test_reads_what_transformers_writes(family):
    theirs = family()
    ours = ModelConfig.from_hf(theirs.to_dict())
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
    )
    assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert ours.head_dim == theirs.head_dim if hasattr(theirs, "head_dim") else True
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.eos_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


def test_head_dim_need_not_divide_hidden():
    config = ModelConfig.from_hf({**LLAMA, "head_dim": 24})
    assert (config.head_dim, config.q_size, config.kv_size) == (24, 96, 48)
    assert config.query_scale == 24**-0.5


def test_kv_groups_put_layers_of_one_visibility_together():
    gemma = {
        **LLAMA,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "sliding_window": 8,
        "head_dim": 16,
    }
    config = ModelConfig.from_hf(gemma)
    assert config.layer_types == (SLIDING,) * 5 + (FULL, SLIDING)
    assert config.kv_groups == (KVGroup((0, 1, 2, 3, 4, 6), 8), KVGroup((5,), None))


def test_qwen2_window_counts_only_when_switched_on():
    qwen = {**LLAMA, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert ModelConfig.from_hf({**qwen, "use_sliding_window": False}).kv_groups == (KVGroup((0, 1), None),)
    on = ModelConfig.from_hf({**qwen, "use_sliding_window": True})
    assert on.kv_groups == (KVGroup((0,), None), KVGroup((1,), 8))


def test_mistral_window_covers_every_layer():
    config = ModelConfig.from_hf({**LLAMA, "model_type": "mistral", "sliding_window": 8})
    assert config.kv_groups == (KVGroup((0, 1), 8),)
    full = ModelConfig.from_hf({**LLAMA, "model_type": "mistral", "sliding_window": None})
    assert full.kv_groups == (KVGroup((0, 1), None),)


def test_multimodal_gemma_reads_its_text_part():
    text = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16}
    config = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (config.model_type, config.tie_embeddings, config.eos_ids) == ("gemma3_text", True, (1, 106))


def test_gemma_old_and_new_rope_spellings_agree():
    base = {**LLAMA, "model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 6, "sliding_window": 8}
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    new = {
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    assert ModelConfig.from_hf({**base, **old}).rope == ModelConfig.from_hf({**base, **new}).rope
    assert ModelConfig.from_hf({**base, **old}).rope_of(SLIDING).kind == "default"


def test_ldr_10_rope_scaling_counts_under_either_key_and_cannot_change_late():
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32}
    old = ModelConfig.from_hf({**LLAMA, "rope_scaling": {"type": "yarn", **scaling}})
    new = ModelConfig.from_hf({**LLAMA, "rope_scaling": {"rope_type": "yarn", **scaling}})
    newest = ModelConfig.from_hf(
        {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **scaling}}
    )
    plain = ModelConfig.from_hf(LLAMA)
    rows = [frequencies(c.rope_of(FULL), c.head_dim, c.max_position) for c in (old, new, newest, plain)]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    assert not torch.equal(rows[0], rows[3])
    assert [c.max_position for c in (old, new, newest, plain)] == [128, 128, 128, 32]
    with pytest.raises(UnsupportedModel, match="'stretchy'"):
        ModelConfig.from_hf({**LLAMA, "rope_scaling": {"type": "stretchy", "factor": 2.0}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        old.max_position = 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "relu"}, "relu"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 15}, "15"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}},
            "short_factor",
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(change, named):
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_hf({**LLAMA, **change})


def test_biases_follow_the_family():
    llama = ModelConfig.from_hf({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen = ModelConfig.from_hf({**LLAMA, "model_type": "qwen2"})
    assert (qwen.qkv_bias, qwen.o_bias, qwen.mlp_bias) == (True, False, False)


@pytest.mark.parametrize(
    "change",
    [
        {"rms_norm_eps": "a"},
        {"rms_norm_eps": -1},
        {"rms_norm_eps": float("nan")},
        {"max_position_embeddings": -5},
        {"num_hidden_layers": 10**9},
        {"eos_token_id": [1, "a"]},
        {"rope_theta": "a"},
        {"rope_scaling": [1]},
        {"head_dim": "wide"},
    ],
    ids=str,
)
def test_values_no_model_can_have_are_refused_by_type(change):
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        ModelConfig.from_hf({**LLAMA, **change})
