"""Safetensors folders: complete and safe before anything is used, ties resolved by rule, never by chance."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from workbench.models.convert import write_folder
from workbench.models.layout import resolve_tie
from workbench.models.safetensors_source import SafetensorsSource, canonical_name
from workbench.models.source import DictSource
from workbench.spec.errors import MissingTensor, ModelNotFound, UnsafeFile, UnsupportedModel, WrongShape

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def shard(folder: Path, names: dict[str, list[str]]) -> None:
    """Split a folder's single file as the index ``file -> tensor names`` says."""
    tensors = load_file(folder / "model.safetensors")
    for file, held in names.items():
        save_file({n: tensors[n] for n in held}, folder / file)
    (folder / "model.safetensors").unlink()
    weight_map = {n: file for file, held in names.items() for n in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def halves(tensors: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    names = sorted(tensors)
    return {"a.safetensors": names[:5], "b.safetensors": names[5:]}


def test_a_folder_gives_its_tensors_unchanged(toy, hf_folder):
    config, weights = toy.config(), toy.weights(toy.config())
    source = SafetensorsSource(hf_folder(config, weights))
    assert set(source.names()) == set(weights)
    assert all(torch.equal(source.tensor(n), t) for n, t in weights.items())
    assert source.nbytes == (source.folder / "model.safetensors").stat().st_size
    with pytest.raises(MissingTensor, match=r"model\.layers\.9"):
        source.tensor("model.layers.9.input_layernorm.weight")


def test_fingerprint_is_of_the_contents(toy, hf_folder):
    config, weights = toy.config(), toy.weights(toy.config())
    whole = SafetensorsSource(hf_folder(config, weights, "whole"))
    split = hf_folder(config, weights, "split")
    shard(split, halves(weights))
    assert SafetensorsSource(split).fingerprint == whole.fingerprint
    assert DictSource(whole.config, weights).fingerprint == whole.fingerprint
    other = weights | {EMBED: weights[EMBED] + 1}
    assert SafetensorsSource(hf_folder(config, other, "other")).fingerprint != whole.fingerprint


def test_fingerprint_is_remembered_until_a_file_changes(toy, hf_folder, monkeypatch):
    config, weights = toy.config(), toy.weights(toy.config())
    folder = hf_folder(config, weights)
    first = SafetensorsSource(folder).fingerprint
    reads: list[str] = []
    original = SafetensorsSource.tensor
    monkeypatch.setattr(SafetensorsSource, "tensor", lambda s, n: reads.append(n) or original(s, n))
    assert SafetensorsSource(folder).fingerprint == first
    assert reads == []
    save_file({n: t + 1 for n, t in weights.items()}, folder / "model.safetensors")
    assert SafetensorsSource(folder).fingerprint != first
    assert len(reads) == len(weights)


@pytest.mark.parametrize("flag", [True, None])
def test_ldr_01_no_head_and_flag_true_or_absent_means_tied(toy, hf_folder, flag):
    config = toy.config(tie_word_embeddings=flag)
    if flag is None:
        del config["tie_word_embeddings"]
    source = SafetensorsSource(hf_folder(config, toy.weights(toy.config())))
    assert source.config.tie_embeddings
    assert HEAD not in source.names()


def test_ldr_01_no_head_and_flag_false_is_an_error(toy, hf_folder):
    config = toy.config(tie_word_embeddings=False)
    with pytest.raises(MissingTensor, match=r"lm_head\.weight.*tie_word_embeddings"):
        SafetensorsSource(hf_folder(config, toy.weights(toy.config())))


def test_ldr_01_nested_flag_counts():
    nested = {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}
    assert resolve_tie(nested, head_present=False, where="x")
    with pytest.raises(MissingTensor):
        resolve_tie({"text_config": {"tie_word_embeddings": False}}, head_present=False, where="x")


def test_a_head_of_its_own_is_used_unless_the_flag_says_tied(toy, hf_folder):
    untied = toy.config(tie_word_embeddings=False)
    weights = toy.weights(untied)
    source = SafetensorsSource(hf_folder(untied, weights, "untied"))
    assert torch.equal(source.tensor(HEAD), weights[HEAD])
    absent = {k: v for k, v in untied.items() if k != "tie_word_embeddings"}
    assert not SafetensorsSource(hf_folder(absent, weights, "absent")).config.tie_embeddings
    tied = SafetensorsSource(hf_folder(toy.config(), weights, "tied"))
    assert HEAD not in tied.names()


def test_ldr_03_a_missing_shard_is_named_before_anything_is_used(toy, hf_folder):
    weights = toy.weights(toy.config())
    folder = hf_folder(toy.config(), weights)
    shard(folder, halves(weights))
    (folder / "b.safetensors").unlink()
    with pytest.raises(MissingTensor, match=r"b\.safetensors"):
        SafetensorsSource(folder)


def test_ldr_03_a_missing_shard_of_a_quantised_checkpoint_is_named(toy, hf_folder):
    weights = toy.weights(toy.config())
    folder = hf_folder(toy.config(quantization_config={"quant_method": "gptq"}), weights)
    shard(folder, halves(weights))
    (folder / "a.safetensors").unlink()
    with pytest.raises(MissingTensor, match=r"a\.safetensors"):
        SafetensorsSource(folder)


def test_ldr_03_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ModelNotFound, match="no safetensors weights"):
        SafetensorsSource(tmp_path)


def test_ldr_03_a_shard_without_its_tensors_is_named(toy, hf_folder):
    weights = toy.weights(toy.config())
    folder = hf_folder(toy.config(), weights)
    parts = halves(weights)
    shard(folder, parts)
    save_file({parts["b.safetensors"][1]: weights[parts["b.safetensors"][1]]}, folder / "b.safetensors")
    with pytest.raises(MissingTensor, match=parts["b.safetensors"][0].replace(".", r"\.")):
        SafetensorsSource(folder)


def test_a_missing_tensor_is_named(toy, hf_folder):
    weights = toy.weights(toy.config())
    del weights["model.layers.0.mlp.down_proj.weight"]
    with pytest.raises(MissingTensor, match=r"model\.layers\.0\.mlp\.down_proj\.weight"):
        SafetensorsSource(hf_folder(toy.config(), weights))


def test_a_wrong_shape_names_tensor_expected_and_found(toy, hf_folder):
    weights = toy.weights(toy.config())
    weights["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(16, 16)
    with pytest.raises(WrongShape, match=r"k_proj.*\(16, 16\).*\(8, 16\)"):
        SafetensorsSource(hf_folder(toy.config(), weights))


def test_a_wrong_dtype_and_an_unannounced_bias_are_refused(toy, hf_folder):
    weights = toy.weights(toy.config())
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(WrongShape, match=r"q_proj.*I8"):
        SafetensorsSource(hf_folder(toy.config(), weights | {name: weights[name].to(torch.int8)}, "int8"))
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(16)}
    with pytest.raises(WrongShape, match=r"q_proj\.bias.*not announce"):
        SafetensorsSource(hf_folder(toy.config(), weights | bias, "bias"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_pickled_weights_are_refused(toy, hf_folder, name):
    folder = hf_folder(toy.config(), toy.weights(toy.config()))
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsafeFile, match=name):
        SafetensorsSource(folder)


def test_an_index_may_not_name_pickles_or_paths(toy, hf_folder):
    weights = toy.weights(toy.config())
    folder = hf_folder(toy.config(), weights)
    index = folder / "model.safetensors.index.json"
    for file in ("pytorch_model.bin", "../model.safetensors"):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, file)}))
        with pytest.raises(UnsafeFile):
            SafetensorsSource(folder)


def test_remote_code_and_quantized_checkpoints_are_refused(toy, hf_folder):
    weights = toy.weights(toy.config())
    with pytest.raises(UnsafeFile, match="auto_map"):
        SafetensorsSource(hf_folder(toy.config(auto_map={"AutoModel": "x.Y"}), weights, "code"))
    with pytest.raises(UnsupportedModel, match="awq"):
        SafetensorsSource(hf_folder(toy.config(quantization_config={"quant_method": "awq"}), weights, "q"))


def test_links_out_of_the_folder_are_refused_but_not_a_hub_cache(toy, hf_folder, tmp_path):
    folder = hf_folder(toy.config(), toy.weights(toy.config()))
    blob = tmp_path / "blob"
    (folder / "model.safetensors").rename(blob)
    os.symlink(blob, folder / "model.safetensors")
    with pytest.raises(UnsafeFile, match="link"):
        SafetensorsSource(folder)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
    snapshot.parent.mkdir(parents=True)
    (folder / "model.safetensors").unlink()
    folder.rename(snapshot)
    blob.rename(tmp_path / "models--a--b" / "blob")
    os.symlink("../../blob", snapshot / "model.safetensors")
    assert SafetensorsSource(snapshot).names()


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}" * 20])
def test_absurd_headers_are_refused(toy, hf_folder, content):
    folder = hf_folder(toy.config(), toy.weights(toy.config()))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UnsafeFile, match=r"model\.safetensors"):
        SafetensorsSource(folder)


def test_a_cut_file_is_refused(toy, hf_folder):
    folder = hf_folder(toy.config(), toy.weights(toy.config()))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(UnsafeFile, match="cut short"):
        SafetensorsSource(folder)


def test_ldr_11_shared_and_strided_tensors_are_saved_once_and_reload_equal(toy, tmp_path):
    config = toy.config(tie_word_embeddings=False)
    weights = toy.weights(config)
    weights[HEAD] = weights[EMBED]
    name = "model.layers.0.mlp.gate_proj.weight"
    weights[name] = torch.randn(16, 32).t()  # a transposed view
    base = torch.randn(64, 16)
    weights["model.layers.0.mlp.up_proj.weight"] = base[::2]
    folder = write_folder(tmp_path / "saved", weights, config)
    stored = load_file(folder / "model.safetensors")
    assert HEAD not in stored
    source = SafetensorsSource(folder)
    assert source.config.tie_embeddings
    assert all(torch.equal(source.tensor(n), weights[n]) for n in source.names())
    payload = sum(t.numel() * t.element_size() for n, t in weights.items() if n != HEAD)
    assert payload < source.nbytes < payload + 4096


def test_names_of_multimodal_checkpoints_are_those_of_the_text_part():
    assert (
        canonical_name("language_model.model.layers.0.mlp.up_proj.weight")
        == "model.layers.0.mlp.up_proj.weight"
    )
    assert canonical_name("model.language_model.norm.weight") == "model.norm.weight"
    assert canonical_name("vision_tower.encoder.weight") is None
    assert canonical_name(EMBED) == EMBED


def test_weights_that_are_a_folder_or_a_link_to_itself_are_no_weights(toy, hf_folder):
    folder = hf_folder(toy.config(), toy.weights(toy.config()))
    weights = folder / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ModelNotFound, match="no safetensors"):
        SafetensorsSource(folder)
    weights.rmdir()
    weights.symlink_to(weights.name)
    with pytest.raises(ModelNotFound, match="no safetensors"):
        SafetensorsSource(folder)
