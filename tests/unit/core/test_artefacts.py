"""Artefacts in a cache that is whole, read-only, full, damaged or impossible: what is measured is used."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors

from workbench.core.artefacts import kept
from workbench.models.cache import cache_dir, locked, remembered
from workbench.spec.errors import Cancelled, StorageError


class Made:
    """Counts how often it was asked."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> str:
        self.times += 1
        return "measured"


def read(path):
    return path.read_text() if path.is_file() else None


def write(path, found):
    path.write_text(found)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def unwritable(folder):
    """As good as read-only, also for root: files sit where folders would be."""
    folder.mkdir()
    (folder / "locks").write_text("")


def test_the_second_call_reads_what_the_first_made(folder):
    make = Made()
    assert [kept("a", read, make, write) for _ in range(2)] == ["measured"] * 2
    assert make.times == 1
    assert [p.name for p in (folder / "calibration").iterdir()] == ["a.safetensors"]


def test_without_a_cache_that_can_be_written_nothing_is_kept_and_nothing_fails(folder):
    unwritable(folder)
    make = Made()
    assert kept("a", read, make, write) == "measured" and make.times == 1
    assert not (folder / "calibration").exists()
    with pytest.raises(StorageError, match="cannot be written"), locked("a"):
        pass


def test_who_waits_is_told_so_and_nobody_else(folder):
    told: list[str] = []
    with locked("a", waits=lambda: told.append("b")):
        pass
    assert told == []
    with (
        locked("a"),
        pytest.raises(Cancelled),
        locked("a", cancel=lambda: len(told) == 2, waits=lambda: told.append("waits")),
    ):
        pass
    assert told == ["waits", "waits"]


def test_an_unwritable_cache_is_read(folder):
    unwritable(folder)
    (folder / "calibration").mkdir()
    (folder / "calibration" / "a.safetensors").write_text("kept")
    assert kept("a", read, Made(), write) == "kept"


def test_a_cache_folder_that_cannot_be_made_is_named(folder, tmp_path):
    folder.write_text("")
    with pytest.raises(StorageError, match="cache cannot be made") as refused:
        cache_dir()
    assert "WORKBENCH_CACHE" in (refused.value.hint or "")
    assert kept("a", read, Made(), write) == "measured"
    assert remembered("x", [folder], lambda: "f" * 64) == "f" * 64


def test_a_digest_that_a_full_disk_cannot_hold_leaves_no_part(folder, tmp_path, monkeypatch):
    def full(path, text):
        path.touch()
        raise OSError(28, "full")

    monkeypatch.setattr(Path, "write_text", full)
    assert remembered("x", [tmp_path], lambda: "f" * 64) == "f" * 64
    assert list((folder / "digests").iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "full"), safetensors.SafetensorError("io")])
def test_a_full_disk_leaves_no_part(folder, error):
    def halfway(path, found):
        path.write_text(found[:3])
        raise error

    make = Made()
    assert kept("a", read, make, halfway) == "measured"
    assert list((folder / "calibration").iterdir()) == []
    assert kept("a", read, make, write) == "measured" and make.times == 2


def test_what_cannot_be_measured_keeps_its_error_and_frees_the_lock(folder):
    def fails() -> str:
        raise StorageError("of the measurement")

    with pytest.raises(StorageError, match="of the measurement"):
        kept("a", read, fails, write)
    assert kept("a", read, Made(), write) == "measured"
    with pytest.raises(Cancelled):
        kept("a", read, Made(), write, lambda: True)
