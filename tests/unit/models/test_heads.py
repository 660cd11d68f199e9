"""Files of draft heads: found by model and kind, bound to weights, written whole, refused when none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from workbench.models import heads
from workbench.models.heads import find_head, read_head, target_name, write_head
from workbench.spec.errors import HeadMismatch, MissingHead, StorageError

ONE = {"w": torch.ones(2, 3)}


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Cache and data folder of the test."""
    cache, data = tmp_path / "cache", tmp_path / "data"
    data.mkdir()
    monkeypatch.setenv("WORKBENCH_CACHE", str(cache))
    monkeypatch.setattr(heads, "data_dir", lambda: data)
    return cache / "heads", data / "heads"


def test_what_is_written_is_read(places):
    path = places[0] / "m" / "medusa.safetensors"
    write_head(path, "medusa", "f" * 64, {"heads": 2}, ONE)
    found = find_head("m", "medusa", "f" * 64)
    assert (found.path, found.kind, found.facts) == (path, "medusa", {"heads": 2})
    assert torch.equal(found.tensors()["w"], ONE["w"])
    assert [p.name for p in path.parent.iterdir()] == ["medusa.safetensors"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_equal_heads_are_equal_files(places):
    """The library writes its notes in an order of chance, another one every time."""
    written = []
    for i in range(6):
        path = places[0] / f"{i}" / "medusa.safetensors"
        tensors = {"w": torch.ones(3), "a": torch.zeros(2, 5, dtype=torch.bfloat16)}
        write_head(path, "medusa", "f" * 64, {"b": 1, "a": "ä"}, dict(sorted(tensors.items(), reverse=i % 2)))
        written.append(path.read_bytes())
    assert len(set(written)) == 1
    found = read_head(path)
    assert found.facts == {"a": "ä", "b": 1} and found.tensors()["a"].shape == (2, 5)
    assert int.from_bytes(written[0][:8], "little") % 8 == 0


def test_trained_here_comes_first_and_the_weights_decide(places):
    cache, data = (root / "m" / "medusa.safetensors" for root in places)
    write_head(data, "medusa", "a" * 64, {}, ONE)
    write_head(cache, "medusa", "b" * 64, {}, ONE)
    assert find_head("m", "medusa", "a" * 64).path == data
    assert find_head("m", "medusa", "b" * 64).path == cache
    assert find_head("m", "medusa", "").path == cache  # planning without weights
    with pytest.raises(HeadMismatch, match="workbench train medusa --target m"):
        find_head("m", "medusa", "c" * 64)


def test_none_is_a_command(places):
    with pytest.raises(MissingHead, match="'workbench train medusa --target m'"):
        find_head("m", "medusa", "a" * 64)


@pytest.mark.parametrize(
    "model, name", [("tiny", "tiny"), ("/x/y/llama-3.2", "llama-3.2"), ("a/b.Q4_1.gguf", "b.Q4_1")]
)
def test_a_folder_goes_by_its_name(model, name):
    assert target_name(model) == name


def test_a_file_that_is_no_head_is_refused(places):
    path = places[0] / "m" / "medusa.safetensors"
    path.parent.mkdir(parents=True)
    for write in (
        lambda: path.write_bytes(b"\x00" * 64),
        lambda: save_file(ONE, path),
        lambda: save_file(ONE, path, {"format": "other", "facts": "{}", "kind": "medusa", "fingerprint": ""}),
        lambda: save_file(
            ONE, path, {"format": heads.FORMAT, "facts": "[]", "kind": "medusa", "fingerprint": ""}
        ),
        lambda: save_file(
            ONE, path, {"format": heads.FORMAT, "facts": "{", "kind": "medusa", "fingerprint": ""}
        ),
    ):
        write()
        with pytest.raises(HeadMismatch, match="no head that can be read"):
            find_head("m", "medusa", "")


def test_numbers_that_are_none_are_refused(places):
    path = places[0] / "m" / "medusa.safetensors"
    write_head(path, "medusa", "f", {}, {"w": torch.tensor([1.0, float("inf")])})
    with pytest.raises(HeadMismatch, match="not finite"):
        read_head(path).tensors()


def test_numbers_of_eight_bits_are_refused(places):
    path = places[0] / "m" / "medusa.safetensors"
    write_head(path, "medusa", "f", {}, {"w": torch.zeros(3, dtype=torch.uint8).view(torch.float8_e4m3fn)})
    with pytest.raises(HeadMismatch, match="a kind that none has"):
        read_head(path).tensors()


def test_a_place_that_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        write_head(tmp_path / "file" / "m.safetensors", "medusa", "f", {}, ONE)


def test_a_place_that_may_not_be_looked_into_says_so(places, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", forbidden)
    with pytest.raises(HeadMismatch, match="cannot be looked for: Permission denied"):
        find_head("m", "medusa", "f")
