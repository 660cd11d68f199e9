"""``workbench runs``, ``compare``, ``export`` and ``measure``: what was measured, found again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
ASK = ("run", "--model", "tiny", "--raw", "--prompt", "def add(a, b):", "--max-tokens", "6", "--json")


@pytest.fixture
def two(workbench: Command) -> tuple[str, str]:
    """Two stored runs: plain, and with a drafter."""
    return workbench(*ASK).json["id"], workbench(*ASK, "-u", "ngram").json["id"]


def test_runs_lists_what_was_saved(workbench: Command, two: tuple[str, str]) -> None:
    rows = workbench("runs", "--json").json["runs"]
    assert [r["id"] for r in rows] == [two[1], two[0]]
    assert rows[0]["recipe"] == "ngram" and two[0][:8] in workbench("runs").out


def test_compare_by_prefix_and_last(workbench: Command, two: tuple[str, str]) -> None:
    done = workbench("compare", two[0][:12], "last", "--json")
    assert done.status == 0
    (comparison,) = done.json["comparisons"]
    assert (comparison["a"], comparison["b"]) == two
    assert comparison["recipe"]["added"] == ["ngram"] and comparison["rows"]
    assert "ngram" in workbench("compare", *two).out


def test_compare_refuses_one_run_and_unknown_ids(workbench: Command, two: tuple[str, str]) -> None:
    for arguments in ((two[0],), (two[0], "zzzz"), (two[0], "")):
        done = workbench("compare", *arguments, "--json")
        assert done.status == 5 and done.json["hint"]


def test_an_empty_store_says_how_to_fill_it(workbench: Command) -> None:
    assert "workbench run" in workbench("runs").out
    done = workbench("compare", "last", "last", "--json")
    assert done.status == 5 and "workbench run" in done.json["hint"]


def test_export_html_and_json(workbench: Command, two: tuple[str, str], tmp_path: Path) -> None:
    page, data = tmp_path / "report.html", tmp_path / "runs.json"
    assert workbench("export", *two, "--out", page, "--json").json["runs"] == list(two)
    assert "<html" in page.read_text(encoding="utf-8")
    assert workbench("export", *two, "--out", data).status == 0
    assert len(json.loads(data.read_text())["runs"]) == 2
    assert workbench("export", two[0], "--out", tmp_path / "report.pdf", "--json").status == 5


def test_a_store_that_cannot_be_written_costs_no_result(workbench: Command, store: Path) -> None:
    store.mkdir()
    (store / "runs.db").mkdir()
    done = workbench(*ASK)
    assert done.status == 0 and done.json["text"] and not done.json["saved"]
    assert "not saved" in done.err


def test_a_damaged_store_is_moved_aside_and_the_run_kept(workbench: Command, store: Path) -> None:
    store.write_bytes(b"not a database" * 500)
    done = workbench(*ASK)
    assert done.status == 0 and done.json["saved"] and "damaged" in done.err
    assert list(store.parent.glob("runs.db.corrupt-*"))
    assert len(workbench("runs", "--json").json["runs"]) == 1


def test_measure_against_the_plain_engine(workbench: Command) -> None:
    settings = ("--context", "140", "--score", "16", "--windows", "1", "--greedy", "4")
    done = workbench("measure", "--model", "tiny", "-u", "kivi:bits=2", *settings, "--json")
    assert done.status == 0
    numbers = {m["name"]: m for m in done.json["metrics"]}
    assert numbers["kl"]["value"] > 0 and numbers["kl"]["tag"] == "measured"
    assert done.json["kind"] == "measure" and done.json["saved"]
    bad = workbench("measure", "--model", "tiny", "--windows", "0", "--json")
    assert bad.status == 2 and bad.json["error"] == "OptionError"
