"""``workbench save-cache`` and ``run --resume``: a conversation goes on in another command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
TEXT = "def add(a, b):\n    return a + b\n\n\n" * 12
PAGED = ("-u", "paged:page_size=16", "-u", "prefix_cache")
WHERE = ("--model", "tiny", *PAGED)


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))


def test_a_saved_conversation_goes_on_as_if_it_were_never_left(workbench: Command, tmp_path: Path) -> None:
    file = tmp_path / "talk.kv"
    ask = ("--raw", "--max-tokens", "8", "--no-save", "--json")
    done = workbench("save-cache", file, *WHERE, "--raw", "-p", TEXT, "--json")
    assert done.status == 0
    saved = done.json["saved"]
    assert saved["file_bytes"] == file.stat().st_size and not saved["lossy"] and saved["codec"] == "raw"
    whole = workbench("run", *WHERE, *ask, "-p", TEXT + "def sub(").json
    resumed = workbench("run", *WHERE, *ask, "-p", "def sub(", "--resume", file).json
    assert resumed["token_ids"] == whole["token_ids"]
    assert resumed["outputs"][0]["cached_tokens"] == saved["cached"] == resumed["resumed"]["cached"]
    assert resumed["resumed"]["ids"] == saved["tokens"]


def test_a_lossy_one_says_so_and_an_answer_is_saved_too(workbench: Command, tmp_path: Path) -> None:
    file = tmp_path / "talk.kv"
    codec = ("--codec", "cachegen:level=64/64/64", "--max-tokens", "5")
    done = workbench("save-cache", file, *WHERE, "--raw", "-p", TEXT, *codec)
    assert done.status == 0 and "cachegen:level=64/64/64" in done.out and "only who resumes it" in done.out
    told = workbench("run", *WHERE, "-p", "def sub(", "--resume", file, "--max-tokens", "4", "--no-save")
    assert told.status == 0 and "cachegen" in told.err and "losses" in told.err


def test_refusals_name_the_way_out_and_have_their_status(workbench: Command, tmp_path: Path) -> None:
    file = tmp_path / "talk.kv"
    missing = workbench("run", *WHERE, "-p", "x", "--resume", file)
    assert missing.status == 5 and "talk.kv" in missing.err
    unknown = workbench("save-cache", file, *WHERE, "-p", TEXT, "--codec", "zip")
    assert unknown.status == 2 and "raw, kvtc, cachegen" in unknown.err
    short = workbench("save-cache", file, *WHERE, "--raw", "-p", "a", "--json")
    assert short.status == 4 and "page" in short.json["message"]
    assert workbench("save-cache", file, *WHERE, "--raw", "-p", TEXT).status == 0
    bare = workbench("run", "--model", "tiny", "-p", "x", "--resume", file)
    assert bare.status == 4 and "prefix_cache" in bare.err
    file.write_bytes(file.read_bytes()[:-1])
    cut = workbench("run", *WHERE, "-p", "x", "--resume", file, "--json")
    assert cut.status == 5 and cut.json["error"] == "PayloadError" and "bytes" in cut.json["message"]
