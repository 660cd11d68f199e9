"""A model folder is data from strangers: opening it runs nothing of it and reads nothing beside it.

Each hostile folder carries a pickle that would create a file; the file must not exist after the refusal.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from workbench.models.registry import open_source
from workbench.spec.errors import ModelError, UnsafeFile

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, int]]:
        return os.open, (str(self.mark), os.O_CREAT | os.O_WRONLY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a sound config.json and no weights."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def write_index(folder: Path, shard: str) -> None:
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_bomb_goes_off_when_unpickled(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    os.close(pickle.loads(pickle.dumps(Bomb(mark))))  # noqa: S301 - shows that the tests below could fail
    assert mark.exists()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pkl", "consolidated.00.pth", "m.ckpt"]
)
@pytest.mark.parametrize("save", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_pickled_weights_are_refused_unread(
    folder: Path, tmp_path: Path, name: str, save: Callable[..., None]
) -> None:
    mark = tmp_path / "mark"
    with (folder / name).open("wb") as file:
        save(Bomb(mark), file)
    with pytest.raises(UnsafeFile) as refused:
        open_source(folder)
    assert refused.value.hint and not mark.exists()


@pytest.mark.parametrize("disguise", ["model.safetensors", "model-00001-of-00001.safetensors"])
def test_a_pickle_named_safetensors_is_refused_unread(folder: Path, tmp_path: Path, disguise: str) -> None:
    mark = tmp_path / "mark"
    (folder / disguise).write_bytes(pickle.dumps(Bomb(mark)))
    write_index(folder, disguise)
    with pytest.raises(ModelError):
        open_source(folder)
    assert not mark.exists()


def test_an_index_cannot_bring_in_a_pickle(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    (folder / "shard.bin").write_bytes(pickle.dumps(Bomb(mark)))
    write_index(folder, "shard.bin")
    with pytest.raises(ModelError):
        open_source(folder)
    assert not mark.exists()


@pytest.mark.parametrize("shard", ["../outside.safetensors", "sub/../../outside.safetensors"])
def test_an_index_cannot_leave_the_folder(folder: Path, tmp_path: Path, shard: str) -> None:
    write_safetensors(tmp_path / "outside.safetensors")
    write_index(folder, shard)
    with pytest.raises(ModelError):
        open_source(folder)


def test_a_link_cannot_leave_the_folder(folder: Path, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "outside.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(UnsafeFile):
        open_source(folder)


def test_remote_code_is_refused(folder: Path) -> None:
    config = {**CONFIG, "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors")
    with pytest.raises(UnsafeFile):
        open_source(folder)


@pytest.mark.parametrize("length", [2**63, 2**40, 0])
def test_a_header_that_lies_about_its_length_is_refused(folder: Path, length: int) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(ModelError):
        open_source(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"model_type": 3}', "[" * 100_000])
def test_a_broken_configuration_is_a_typed_error(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    write_safetensors(folder / "model.safetensors")
    with pytest.raises(ModelError):
        open_source(folder)


def write_safetensors(path: Path) -> None:
    """One small tensor, well formed."""
    from safetensors.torch import save_file

    save_file({"model.embed_tokens.weight": torch.zeros(16, 8)}, path)
