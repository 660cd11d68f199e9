"""``workbench measure --method``, ``--protocol needle`` and ``workbench sweep``: tables, JSON, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]
SMALL = ("--model", "tiny", "--context", "96", "--score", "16", "--windows", "2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that belongs to the test: no point is known before."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_methods_side_by_side(workbench: Command) -> None:
    methods = (
        "--method",
        "kv_int8",
        "--method",
        "kivi:residual=32,bits=2",
        "--method",
        "snapkv:keep=0.5,recent=16",
    )
    done = workbench("measure", *SMALL, *methods, "--json")
    assert done.status == 0 and done.json["state"] == "done"
    runs = done.json["runs"]
    assert [r["recipe"][0]["id"] for r in runs] == ["kv_int8", "kivi", "snapkv"] and all(
        r["saved"] for r in runs
    )
    numbers = [{m["name"]: m for m in r["metrics"]} for r in runs]
    assert all(n["kl"]["tag"] == "measured" and n["kl"]["n"] == 2 and n["kl"]["spread"] for n in numbers)
    assert all({"whole_ratio", "top1", "perplexity_change"} <= n.keys() for n in numbers)
    assert len(workbench("runs", "--json").json["runs"]) == 3
    first = workbench("compare", runs[0]["id"], runs[1]["id"])
    assert first.status == 0 and "kl" in first.out.lower()


def test_a_table_says_what_and_where(workbench: Command) -> None:
    done = workbench("measure", *SMALL, "--method", "kv_fp8", "--no-save")
    assert done.status == 0
    for word in (
        "kv_fp8",
        "codec ×",
        "whole ×",
        "KL",
        "low … high",
        "top-1",
        "ΔPPL",
        "MB/s",
        "measured",
        "threads",
    ):
        assert word in done.out
    assert not workbench("runs", "--json").json["runs"]


def test_needles_say_when_they_are_not_valid(workbench: Command) -> None:
    arguments = ("--model", "tiny", "--context", "128", "--depths", "2", "--trials", "2")
    done = workbench("measure", "--protocol", "needle", *arguments, "--method", "kv_fp8", "--json")
    assert done.status == 0
    (run,) = done.json["runs"]
    recall = {m["name"]: m for m in run["metrics"]}
    assert run["plan"]["needle"]["valid"] == (recall["needle_recall_plain"]["value"] >= 90)
    assert not run["plan"]["needle"]["valid"], "the tiny model is not known to recall"
    assert any("not valid here" in note for note in run["notes"])
    plain = workbench("measure", "--protocol", "needle", *arguments, "-u", "kv_int8", "--aware")
    assert plain.status == 0 and "not valid here" in plain.out and "kv_int8" in plain.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("measure", "--method", "nope"),
        ("measure", "--method", "ngram"),
        ("measure", "--method", "kivi:bits=3"),
        ("measure", "--method", "kivi", "-u", "kv_fp8"),
        ("measure", "--method", "kivi", "--protocol", "ppl"),
        ("measure", "--method", "kivi", "--windows", "0"),
        ("measure", "--method", "kivi", "--context", "-3"),
        ("measure", "--protocol", "needle", "--depths", "0"),
        ("measure", "--protocol", "needle", "--context", "3"),
        ("sweep", "weights"),
        ("sweep", "kv", "--technique", "ngram"),
        ("sweep", "kv", "--windows", "0"),
    ],
)
def test_bad_input_is_refused_with_a_way_out(workbench: Command, arguments: tuple[str, ...]) -> None:
    done = workbench(*arguments, "--model", "tiny", "--json")
    assert done.status == 2 and done.json["message"] and done.json["hint"]


@pytest.mark.parametrize("protocol", ["p1", "needle"])
def test_a_text_that_is_too_short(workbench: Command, tmp_path: Path, protocol: str) -> None:
    (tmp_path / "short.txt").write_text("Too short.")
    arguments = ("--protocol", protocol, "--method", "kivi", "--text", str(tmp_path / "short.txt"))
    done = workbench("measure", "--model", "tiny", *arguments, "--json")
    assert done.status == 4 and "tokens" in done.json["message"]


@pytest.mark.parametrize(("sent", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_sweep_stopped_in_the_middle_goes_on(
    workbench: Command, cache: Path, sent: int, status: int
) -> None:
    arguments = ("sweep", "kv", "--technique", "kv_fp8", "--technique", "kv_int8", *SMALL)
    arguments += ("--windows", "8", "--json")
    code = "import sys; from workbench.cli.start import main; sys.argv[0] = 'workbench'; sys.exit(main())"
    path = cache / "points" / "p1.jsonl"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ,
    ) as process:
        deadline = time.monotonic() + 120
        while not path.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        process.send_signal(sent)
    assert process.returncode == status
    before = path.read_bytes()
    done = workbench(*arguments)
    assert done.status == 0 and len(done.json["runs"]) == 5 and done.json["frontier"]
    after = path.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    assert after.startswith(whole) and whole
    keys = [json.loads(line)["key"] for line in after.splitlines() if line.endswith(b"}}")]
    assert len(set(keys)) == 40
    again = workbench(*arguments)
    assert again.status == 0 and path.read_bytes() == after
    assert [m for r in again.json["runs"] for m in r["metrics"] if m["name"] == "kl"] == [
        m for r in done.json["runs"] for m in r["metrics"] if m["name"] == "kl"
    ]


def test_bars_of_one_technique_as_a_table_and_as_a_run(workbench: Command) -> None:
    sizes = ("--size", "context=150", "--size", "score=16", "--size", "windows=1")
    arguments = ("bench", "kv_bars", "--model", "tiny", "--cell", "kivi", *sizes)
    done = workbench(*arguments, "--json")
    assert done.status == 0 and done.json["kind"] == "bench" and done.json["saved"]
    rows = done.json["plan"]["bench"]["rows"]
    assert [r["technique"] for r in rows] == ["kivi", "kivi:bits=2", "kivi 2 bits, K per token"]
    assert all(r["met"] is None and r["kl"] > 0 for r in rows)  # the bars are of another model
    assert "bars_met" not in {m["name"] for m in done.json["metrics"]}
    table = workbench(*arguments, "--no-save").out  # points are known now
    assert "MISSED" not in table and table.count("KL ≤") == 2
    assert "bars are of smollm2-135m" in table and "no verdict on tiny and 150 tokens" in table
    assert "kv_bars: kivi vs" in workbench("runs").out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--cell", "nope"),
        ("--size", "batch=3"),
        ("-u", "kivi"),
        ("--peer", "transformers"),
        ("--size", "windows=0"),
    ],
)
def test_bars_refuse_what_they_do_not_know(workbench: Command, arguments: tuple[str, ...]) -> None:
    done = workbench("bench", "kv_bars", "--model", "tiny", *arguments, "--json")
    assert done.status == 2 and done.json["hint"]
