"""Modules of multi-token prediction in a checkpoint: counted, left alone by the model, read on demand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.layout import EMBED, HEAD
from workbench.models.mtp import mtp_config, read_mtp
from workbench.models.plain import plain_pack
from workbench.models.safetensors_source import SafetensorsSource
from workbench.models.source import DictSource
from workbench.models.weightset import build_weight_set
from workbench.spec.errors import HeadMismatch, MissingTensor, UnsupportedModel, WrongShape
from workbench.training.mtp.export import config_of, tensors_of, write_weights
from workbench.training.mtp.model import MTPModel

TOY = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
    tie_word_embeddings=True,
    initializer_range=0.2,
    max_position_embeddings=64,
)
DTYPE = torch.float64


def folder_of(path: Path, modules: int = 2) -> Path:
    write_weights(path, MTPModel(TOY, modules, 3), torch.float32)
    return path


def stripped(path: Path, source: SafetensorsSource, declared: int) -> Path:
    """The same checkpoint without any tensor of a module."""
    path.mkdir()
    kept = {
        n: source.tensor(n) for n in source.names() if not n.startswith(("model.layers.2", "model.layers.3"))
    }
    save_file({n: t.contiguous() for n, t in kept.items()}, path / "model.safetensors")
    config = TOY.to_dict() | ({"num_nextn_predict_layers": declared} if declared else {})
    (path / "config.json").write_text(LlamaConfig(**config).to_json_string(use_diff=False))
    return path


def decoder_of(source, numerics="pinned") -> Decoder:
    return Decoder(source.config, build_weight_set(source, plain_pack(DTYPE, numerics), DTYPE, numerics))


def logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Of a text alone."""
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(layer, q, k, v):
        kept[layer] = k, v
        k, v = (x.repeat_interleave(2, 1).transpose(0, 1) for x in kept[layer])
        scores = q.transpose(0, 1) @ k.transpose(-1, -2)
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        out = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
        return out.transpose(0, 1).flatten(1)

    with torch.inference_mode():
        return decoder.forward(torch.tensor(ids), torch.arange(len(ids)), attend).logits


def test_the_configuration_counts_them_and_is_named_as_before(tmp_path: Path) -> None:
    source = SafetensorsSource(folder_of(tmp_path / "a"))
    assert source.config.mtp_modules == 2 and source.config.num_layers == 2
    assert repr(source.config) == repr(ModelConfig.from_hf(TOY.to_dict()))
    assert ModelConfig.from_hf(TOY.to_dict()).mtp_modules == 0


@pytest.mark.parametrize("value", [-1, 1.5, "one", 65, [1]])
def test_nonsense_instead_of_a_count_is_refused(value) -> None:
    with pytest.raises(UnsupportedModel, match="num_nextn_predict_layers"):
        ModelConfig.from_hf(TOY.to_dict() | {"num_nextn_predict_layers": value})


@pytest.mark.parametrize("declared", [0, 2])
def test_without_the_modules_the_main_logits_are_bitwise_equal(tmp_path: Path, declared: int) -> None:
    whole = SafetensorsSource(folder_of(tmp_path / "a"))
    plain = SafetensorsSource(stripped(tmp_path / "b", whole, declared))
    assert plain.config.mtp_modules == declared
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    assert torch.equal(logits(decoder_of(whole), ids), logits(decoder_of(plain), ids))


def test_transformers_opens_it_as_a_plain_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a")
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=DTYPE, attn_implementation="eager")
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(
        logits(decoder_of(SafetensorsSource(folder)), ids), expected, rtol=0, atol=1e-5
    )


def test_a_model_reads_none_of_their_tensors(tmp_path: Path, monkeypatch) -> None:
    source = SafetensorsSource(folder_of(tmp_path / "a"))
    weights = build_weight_set(source, plain_pack(DTYPE), DTYPE)
    read: list[str] = []
    tensor = source.tensor
    monkeypatch.setattr(source, "tensor", lambda name: read.append(name) or tensor(name))
    build_weight_set(source, plain_pack(DTYPE), DTYPE)
    assert read and not any(n.startswith(("model.layers.2.", "model.layers.3.")) for n in read)
    read.clear()
    read_mtp(source, 1, plain_pack(DTYPE), weights)
    assert set(read) == {n for n in source.names() if n.startswith("model.layers.3.")}


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    model = MTPModel(TOY, 1, 3)
    source = DictSource(ModelConfig.from_hf(config_of(model)), tensors_of(model, torch.float32))
    weights = build_weight_set(source, plain_pack(DTYPE), DTYPE)
    module, layer = read_mtp(source, 0, plain_pack(DTYPE), weights), model.mtp[0]
    x = torch.randn(3, 64, dtype=DTYPE)
    with torch.no_grad():
        torch.testing.assert_close(module.project(x), layer.eh_proj.double()(x))
        x = x[:, :32]
        torch.testing.assert_close(module.layer.qkv(x)[:, :32], layer.self_attn.q_proj.double()(x))
    assert mtp_config(source.config).num_layers == 1
    for gain, norm in (
        (module.embed_gain, layer.enorm),
        (module.state_gain, layer.hnorm),
        (module.head_gain, layer.shared_head["norm"]),
    ):
        assert torch.equal(gain, norm.weight.double())


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("eh_proj.weight", MissingTensor),
        ("shared_head.norm.weight", MissingTensor),
        ("enorm.weight", WrongShape),
    ],
)
def test_an_incomplete_module_is_named(name: str, error: type[Exception]) -> None:
    model = MTPModel(TOY, 1, 3)
    tensors = tensors_of(model, torch.float32)
    if error is MissingTensor:
        del tensors[f"model.layers.2.{name}"]
    else:
        tensors[f"model.layers.2.{name}"] = torch.ones(7)
    source = DictSource(ModelConfig.from_hf(config_of(model)), tensors)
    weights = build_weight_set(source, plain_pack(DTYPE), DTYPE)
    with pytest.raises(error, match=rf"model\.layers\.2\.{name}"):
        read_mtp(source, 0, plain_pack(DTYPE), weights)


@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_repeated_embedding_or_head_must_be_the_models(copy: str) -> None:
    model = MTPModel(TOY, 1, 3)
    tensors = tensors_of(model, torch.float32)
    tensors[f"model.layers.2.{copy}"] = tensors[EMBED].clone()
    config = ModelConfig.from_hf(config_of(model))
    weights = build_weight_set(DictSource(config, tensors), plain_pack(DTYPE), DTYPE)
    read_mtp(DictSource(config, tensors), 0, plain_pack(DTYPE), weights)
    tensors[f"model.layers.2.{copy}"] = tensors[EMBED] * 1.01
    with pytest.raises(HeadMismatch, match=copy.replace(".", r"\.")):
        read_mtp(DictSource(config, tensors), 0, plain_pack(DTYPE), weights)


def test_a_head_of_its_own_is_compared_with_the_head(tmp_path: Path) -> None:
    model = MTPModel(TOY, 1, 3)
    tensors = tensors_of(model, torch.float32) | {HEAD: torch.randn(50, 32)}
    tensors["model.layers.2.shared_head.head.weight"] = tensors[HEAD].clone()
    config = ModelConfig.from_hf(config_of(model) | {"tie_word_embeddings": False})
    weights = build_weight_set(DictSource(config, tensors), plain_pack(DTYPE), DTYPE)
    found = read_mtp(DictSource(config, tensors), 0, plain_pack(DTYPE), weights)
    assert (found.project.n, found.project.k) == (32, 64)
    tensors["model.layers.2.shared_head.head.weight"] = tensors[EMBED].clone()  # where the head was tied
    with pytest.raises(HeadMismatch, match=r"shared_head\.head"):
        read_mtp(DictSource(config, tensors), 0, plain_pack(DTYPE), weights)


def test_biases_of_a_modules_layer_are_no_surplus(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", 1)
    source = SafetensorsSource(folder)
    tensors = {n: source.tensor(n).clone() for n in source.names()}
    tensors["model.layers.2.self_attn.q_proj.bias"] = torch.zeros(32)
    save_file(tensors, folder / "model.safetensors")
    assert SafetensorsSource(folder).config.mtp_modules == 1
    tensors["model.layers.3.self_attn.q_proj.bias"] = torch.zeros(32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WrongShape, match=r"layers\.3"):
        SafetensorsSource(folder)
