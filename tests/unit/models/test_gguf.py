"""GGUF files: rows, norms, names and configuration come back as the Hugging Face checkpoint has them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig
from transformers.utils import logging

from workbench.models.convert import NOTE, as_stored, convert_gguf
from workbench.models.gguf_config import hf_config, shortest_float
from workbench.models.gguf_map import BLOCK_NAMES, hf_name, unpermute_rows
from workbench.models.gguf_source import GGUFSource
from workbench.models.safetensors_source import SafetensorsSource
from workbench.spec.errors import (
    Cancelled,
    ModelError,
    ModelNotFound,
    UnsafeFile,
    UnsupportedModel,
    WrongShape,
)

Q4_1, Q8_0 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
logging.disable_progress_bar()


def permute_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's own order, as ``LlamaModel.permute`` of convert_hf_to_gguf.py writes it."""
    shape = rows.shape
    return rows.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def gguf_tensors(weights, architecture, heads=4, kv_heads=2):
    """GGUF names and layouts for Hugging Face tensors, written independently of the package's map."""
    arch = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == architecture)
    layers = 1 + max(int(n.split(".")[2]) for n in weights if n.startswith("model.layers."))
    names = gguf.get_tensor_name_map(arch, layers)
    out = {}
    for name, tensor in weights.items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = permute_rows(tensor, heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = permute_rows(tensor, kv_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        out[names.get_name(name, try_suffixes=(".weight", ".bias"))] = tensor.numpy()
    return out


@pytest.mark.parametrize("heads", [1, 2, 3, 8])
def test_unpermute_undoes_the_row_order(heads):
    rows = torch.arange(heads * 6 * 5).reshape(heads * 6, 5)
    assert torch.equal(unpermute_rows(permute_rows(rows, heads), heads), rows)
    assert heads == 1 or not torch.equal(unpermute_rows(permute_rows(rows, heads), 1), rows)


def test_ldr_06_llama_rows_are_restored_exactly_with_their_own_head_counts(toy, write_gguf, tmp_path):
    weights = toy.weights(toy.config())
    source = GGUFSource(
        write_gguf(tmp_path / "m.gguf", "llama", toy.gguf_meta, gguf_tensors(weights, "llama"))
    )
    assert set(source.names()) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(source.tensor(name), tensor), name


def test_ldr_06_logits_are_those_of_the_original(toy, write_gguf, hf_folder, tmp_path):
    weights = toy.weights(toy.config())
    source = GGUFSource(
        write_gguf(tmp_path / "m.gguf", "llama", toy.gguf_meta, gguf_tensors(weights, "llama"))
    )
    ids = torch.tensor([[5, 9, 200, 31, 7]])
    original = AutoModelForCausalLM.from_pretrained(
        hf_folder(toy.config(), weights, "a"), dtype=torch.float32
    )
    restored_weights = {n: source.tensor(n) for n in source.names()}
    restored = AutoModelForCausalLM.from_pretrained(
        hf_folder(source.hf, restored_weights, "b"), dtype=torch.float32
    )
    as_written = {n: source.tensor(n) for n in source.names()}
    name = "model.layers.0.self_attn.k_proj.weight"
    as_written[name] = permute_rows(as_written[name], 2)
    wrong = AutoModelForCausalLM.from_pretrained(hf_folder(source.hf, as_written, "c"), dtype=torch.float32)
    with torch.no_grad():
        expected = original(ids).logits
        assert torch.allclose(restored(ids).logits, expected, atol=1e-5)
        assert not torch.allclose(wrong(ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_ldr_06_other_architectures_are_not_reordered(toy, write_gguf, tmp_path, architecture):
    weights = toy.weights(toy.config(model_type=architecture))
    meta = toy.gguf_meta | {"attention.key_length": 4, "attention.value_length": 4}
    path = write_gguf(
        tmp_path / "m.gguf", architecture, meta, gguf_tensors(weights, architecture), pre="qwen2"
    )
    source = GGUFSource(path)
    assert set(source.names()) == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(source.tensor(name), tensor), name


def test_gemma_norm_offset_names_and_configuration(toy, write_gguf, tmp_path):
    shared = {
        "vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4,
        "query_pre_attn_scalar": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(**shared)).float().eval()
    weights = {n: t.detach() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name].normal_(0, 0.1)
    meta = toy.gguf_meta | {
        "block_count": 6, "attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8,
        "attention.sliding_window": 4, "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "gemma3", meta, gguf_tensors(weights, "gemma3")))
    for name, tensor in weights.items():
        assert torch.allclose(source.tensor(name), tensor, atol=2e-7), name
    assert source.config.norm_offset == 1.0
    assert [source.config.window(i) for i in range(6)] == [4, 4, 4, 4, 4, None]
    rebuilt = Gemma3ForCausalLM(Gemma3TextConfig(**source.hf)).float().eval()
    rebuilt.load_state_dict({n: source.tensor(n) for n in source.names()}, strict=False)
    ids = torch.tensor([[5, 9, 200, 31, 7, 8, 9]])
    with torch.no_grad():
        assert torch.allclose(rebuilt(ids).logits, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize("architecture", sorted(BLOCK_NAMES))
def test_names_agree_with_llama_cpp(toy, architecture):
    model_type = "gemma3_text" if architecture == "gemma3" else architecture
    config = toy.config(model_type=model_type, attention_bias=True, tie_word_embeddings=False)
    weights = toy.weights(config)
    back = {hf_name(architecture, stored) for stored in gguf_tensors(weights, architecture)}
    assert back == set(weights)


def test_quantized_formats_are_dequantized_as_the_gguf_package_does(toy, write_gguf, tmp_path):
    config = toy.config(hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64)
    weights = toy.weights(config)
    meta = toy.gguf_meta | {"embedding_length": 256, "feed_forward_length": 256, "rope.dimension_count": 64}
    formats = {
        "blk.0.ffn_up.weight": Q4_1,
        "token_embd.weight": Q8_0,
        "blk.0.ffn_down.weight": gguf.GGMLQuantizationType.BF16,
    }
    tensors = gguf_tensors(weights, "llama")
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", "llama", meta, tensors, formats))
    assert source.formats["model.layers.0.mlp.up_proj.weight"] == "Q4_1"
    up = source.tensor("model.layers.0.mlp.up_proj.weight")
    expected = gguf.dequantize(gguf.quantize(tensors["blk.0.ffn_up.weight"], Q4_1), Q4_1)
    assert torch.equal(up, torch.from_numpy(expected))
    embed, original = source.tensor("model.embed_tokens.weight"), weights["model.embed_tokens.weight"]
    # Q8_0: blocks of 32, an error of at most half a step, and 127 steps of a scale rounded to float16.
    steps = original.reshape(-1, 32).abs().amax(1) / 127
    assert ((embed - original).reshape(-1, 32).abs().amax(1) <= steps * (0.5 + 127 * 2**-11)).all()
    down = source.tensor("model.layers.0.mlp.down_proj.weight")
    assert down.dtype == torch.bfloat16
    assert torch.equal(down, weights["model.layers.0.mlp.down_proj.weight"].bfloat16())


def test_conversion_writes_a_folder_that_transformers_loads(toy, write_gguf, tmp_path):
    weights = toy.weights(toy.config(intermediate_size=32))
    meta, tensors = toy.gguf_meta, gguf_tensors(weights, "llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", meta, tensors, {"blk.0.ffn_down.weight": Q4_1})
    folder = convert_gguf(path, tmp_path / "out", origin={"licence": "Apache-2.0"})
    note = json.loads((folder / NOTE).read_text())
    assert note["licence"] == "Apache-2.0"
    assert note["formats"]["Q4_1"] == 1
    assert len(note["file_sha256"]) == 64
    gguf_source, converted = GGUFSource(path), SafetensorsSource(folder)
    for name in gguf_source.names():
        assert torch.equal(converted.tensor(name), as_stored(gguf_source.tensor(name))), name
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(model.model.embed_tokens.weight, converted.tensor("model.embed_tokens.weight").float())
    assert model.config.eos_token_id == 2


def test_conversion_says_when_the_weights_sat_on_a_grid(toy, write_gguf, tmp_path):
    weights = toy.weights(toy.config(hidden_size=32, intermediate_size=32, head_dim=8))
    meta = toy.gguf_meta | {"embedding_length": 32, "rope.dimension_count": 8}
    tensors = gguf_tensors(weights, "llama")
    linears = [n for n in tensors if n.startswith("blk.") and "norm" not in n]
    path = write_gguf(tmp_path / "m.gguf", "llama", meta, tensors, dict.fromkeys(linears, Q4_1))
    note = json.loads((convert_gguf(path, tmp_path / "out") / NOTE).read_text())
    assert note["weight_grid"] == "Q4_1"
    assert "already sat on a grid" in note["weight_note"]
    plain = write_gguf(tmp_path / "plain.gguf", "llama", meta, tensors)
    assert "weight_grid" not in json.loads((convert_gguf(plain, tmp_path / "out2") / NOTE).read_text())


def test_norms_keep_float32_only_when_bfloat16_would_lose():
    exact, inexact = torch.tensor([1.0, 0.5]), torch.tensor([1.0, 1.0 + 2**-20])
    assert as_stored(exact).dtype == torch.bfloat16
    assert torch.equal(as_stored(inexact), inexact)
    assert as_stored(torch.randn(3, 3)).dtype == torch.bfloat16


def test_a_cancelled_conversion_leaves_nothing(toy, write_gguf, tmp_path):
    weights = toy.weights(toy.config())
    path = write_gguf(tmp_path / "m.gguf", "llama", toy.gguf_meta, gguf_tensors(weights, "llama"))
    seen: list[float] = []
    with pytest.raises(Cancelled):
        convert_gguf(
            path, tmp_path / "d" / "out", progress=lambda f, w: seen.append(f), cancel=lambda: len(seen) > 4
        )
    assert len(seen) == 5
    assert not (tmp_path / "d").exists() or list((tmp_path / "d").iterdir()) == []


def test_rope_scaling_is_read_or_refused(toy):
    meta = {f"llama.{k}": v for k, v in toy.gguf_meta.items()} | {"general.architecture": "llama"}
    names = frozenset({"token_embd.weight"})
    yarn = meta | {
        "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
    }  # fmt: skip
    rope = hf_config(yarn, names, 320)["rope_parameters"]
    assert rope == {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    with pytest.raises(UnsupportedModel, match="longrope"):
        hf_config(
            meta | {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, names, 320
        )
    with pytest.raises(UnsupportedModel, match="frequency factors"):
        hf_config(meta, names, 320, np.array([1.0, 3.0], np.float32))
    with pytest.raises(ModelError, match=r"llama\.embedding_length"):
        hf_config({k: v for k, v in meta.items() if "embedding" not in k}, names, 320)


def test_llama_3_frequency_factors_become_its_scaling():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    factors = (plain / scaled.double()).numpy().astype(np.float32)
    meta = {
        "general.architecture": "llama", "llama.embedding_length": 256, "llama.attention.head_count": 4,
        "llama.feed_forward_length": 64, "llama.block_count": 1, "llama.context_length": 131072,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 500000.0,
    }  # fmt: skip
    assert hf_config(meta, frozenset(), 320, factors)["rope_parameters"] == scaling


def test_stored_floats_come_back_as_written():
    assert shortest_float(np.float32(1e-5)) == 1e-5
    assert shortest_float(np.float32(1e6)) == 1e6


def test_refusals_name_what_is_wrong(toy, write_gguf, tmp_path):
    weights = toy.weights(toy.config())
    tensors = gguf_tensors(weights, "llama")
    with pytest.raises(UnsupportedModel, match="mamba"):
        GGUFSource(write_gguf(tmp_path / "a.gguf", "mamba", toy.gguf_meta, tensors))
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.ssm_in\.weight"):
        extra = tensors | {"blk.0.ssm_in.weight": np.zeros((4, 4), np.float32)}
        GGUFSource(write_gguf(tmp_path / "b.gguf", "llama", toy.gguf_meta, extra))
    with pytest.raises(WrongShape, match=r"down_proj.*\(16, 48\)"):
        GGUFSource(write_gguf(tmp_path / "c.gguf", "llama", toy.gguf_meta | {"feed_forward_length": 48}, {
            **tensors, "blk.0.ffn_up.weight": np.zeros((48, 16), np.float32),
            "blk.0.ffn_gate.weight": np.zeros((48, 16), np.float32)}))  # fmt: skip


def test_damaged_files_are_refused(toy, write_gguf, tmp_path):
    good = write_gguf(
        tmp_path / "m.gguf", "llama", toy.gguf_meta, gguf_tensors(toy.weights(toy.config()), "llama")
    )
    content = good.read_bytes()
    for i, broken in enumerate([b"", b"PK\x03\x04" + content[4:], content[:600], content[:-5000],
                                content[:8] + b"\xff" * 8 + content[16:]]):  # fmt: skip
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(broken)
        with pytest.raises(UnsafeFile):
            GGUFSource(path)
    with pytest.raises(ModelNotFound):
        GGUFSource(Path(tmp_path / "none.gguf"))
