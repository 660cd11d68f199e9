"""Runs of the GPU check without a GPU: watched children, scripted sessions, interrupts, the report."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from workbench.cli.gpu_check import check
from workbench.cli.main import main
from workbench.kernels.bench import files, page, record, roster
from workbench.kernels.bench.plan import planned
from workbench.kernels.bench.session import Session
from workbench.kernels.bench.watch import Answer, Child

CHILD = """
import json, os, sys, time
say = lambda **line: print(json.dumps(line), flush=True)
say(ready=True)
for text in sys.stdin:
    do = json.loads(text)["do"]
    if do == "hang":
        say(part=1); say(armed="a launch"); time.sleep(60)
    elif do == "crash":
        print("the last words", file=sys.stderr, flush=True); os._exit(7)
    elif do == "slow":
        for i in range(4):
            say(armed="a part"); time.sleep(0.4); say(**{str(i): os.getpid()})
        say(end=True)
    elif do == "lost":
        say(error="illegal access", lost=True)
    elif do == "refuse":
        say(error="no", lost=False)
    else:
        say(pid=os.getpid()); say(end=True)
"""


@pytest.fixture
def child() -> Any:
    with Child([sys.executable, "-c", CHILD], prepare=30.0, silence=0.8) as made:
        yield made


def test_a_child_that_hangs_is_killed_and_replaced(child: Child) -> None:
    before = child.ask(do="fine").parts["pid"]
    hung = child.ask(do="hang")
    assert hung.hung and hung.parts == {"part": 1} and "a launch" in hung.error
    assert not Path(f"/proc/{before}").exists()
    after = child.ask(do="fine")
    assert after.complete and after.parts["pid"] != before


def test_silence_is_counted_anew_with_every_part(child: Child) -> None:
    answer = child.ask(do="slow")  # 1.6 s in all, 0.8 s allowed
    assert answer.complete and sorted(answer.parts) == ["0", "1", "2", "3"]


def test_a_child_that_dies_or_loses_its_device_is_replaced(child: Child) -> None:
    pid = child.ask(do="fine").parts["pid"]
    refused = child.ask(do="refuse")
    assert refused.error == "no" and child.ask(do="fine").parts["pid"] == pid
    lost = child.ask(do="lost")
    assert lost.lost and child.ask(do="fine").parts["pid"] != pid
    dead = child.ask(do="crash")
    assert dead.lost and "status 7" in dead.error and "the last words" in dead.error
    assert child.ask(do="fine").complete


def test_a_child_gives_up_when_told_to() -> None:
    began = time.monotonic()
    with Child([sys.executable, "-c", CHILD], stop=lambda: time.monotonic() - began > 1) as child:
        answer = child.ask(do="hang")
    assert answer.stopped and not answer.hung


class Scripted:
    """Answers a session as a script says; unscripted cases pass, or take a microsecond."""

    def __init__(self, script: dict[str, Any], asked: list[tuple[str, str]]) -> None:
        self.script, self.asked = script, asked

    def ask(self, **request: Any) -> Answer:
        do, key = request["do"], request.get("case", "")
        self.asked.append((do, key))
        if do == "facts":
            return self.script.get("facts") or Answer({"name": "A <chip>", "capability": [9, 0]})
        if do == "ceiling":
            one = {"what": "x", "by": "events", "low": 1.0, "high": 1.0, "repeats": 9, "median": 1.0}
            return Answer(
                {"bytes": {"rate": 4e12, **one}, "bf16": {"rate": 8e14, **one}, "fp8": {"error": "no"}}
            )
        if do == "prepare":
            return Answer({"launches": 1, "seconds": 0.1})
        found = self.script.get(key)
        if callable(found):
            found = found()
        if isinstance(found, Answer):
            return found
        right = {"error": 1e-3, "plain": 2e-3, "allowed": 4e-3, "worst_row": 1e-3, "wrong": ""}
        if do == "check":
            return Answer({"outputs": {"y": right}, "passed": True, "figures": {}, "seconds": 0.1})
        return Answer({"ours": took(1e-3), "sets": 2, **(found or {})})

    def close(self) -> None:
        pass


def took(seconds: float, **more: Any) -> dict[str, Any]:
    spread = {"low": seconds, "high": 1.1 * seconds, "repeats": 20, "by": "graph of 20 calls"}
    return {"median": seconds, **spread, **more}


def scripted(script: dict[str, Any], only: list[str], **options: Any) -> tuple[dict[str, Any], list[Any]]:
    asked: list[tuple[str, str]] = []
    session = Session(roster.chosen(only), lambda stop: Scripted(script, asked), seed=1, jobs=2, **options)
    return session.run(), asked


def states(found: dict[str, Any]) -> dict[str, str]:
    return {row["key"]: row["state"] for row in found["cases"]}


W4 = "w4a16: M=1, 8192^2"


def test_rates_goals_and_baselines_of_a_run() -> None:
    parts = {
        "ours": took(10e-6),
        "baselines": {"cuBLAS bf16": took(32e-6, differs=2e-3), "other": {"error": "not built"}},
        "variants": {"no split-K": took(15e-6)},
    }
    found, _ = scripted({W4: parts}, ["w4a16"])
    row = next(r for r in found["cases"] if r["key"] == W4)
    assert row["state"] == "measured" and row["rate_unit"] == "TB/s"
    assert row["rate"] == pytest.approx(row["bytes"] / 10e-6 / 1e12)
    assert row["fraction"] == pytest.approx(row["bytes"] / 4e12 / 10e-6)
    assert [(g["of"], g["level"]) for g in row["goals"]] == [("", "stretch"), ("cuBLAS bf16", "must")]
    assert row["variants"]["no split-K"]["times_faster"] == pytest.approx(1.5)
    assert found["state"] == "done" and found["verdict"]["goals"]["stretch"] >= 1


def test_wrong_numbers_are_reported_the_rest_goes_on_and_nothing_wrong_is_measured() -> None:
    bad = {"y": {"wrong": "3 of 9 elements are not finite"}}
    wrong = Answer({"outputs": bad, "passed": False, "figures": {}, "seconds": 0.1})
    found, asked = scripted({"w4a16: M=1, 64 x 128": wrong}, ["w4a16", "e8p"])
    by = states(found)
    assert by["w4a16: M=1, 64 x 128"] == "failed" and by["w4a16: M=512, 1024 x 4096, prefill"] == "passed"
    assert by[W4] == "skipped" and by["e8p: M=1, 8192^2"] == "measured"
    assert ("timed", W4) not in asked
    assert not found["verdict"]["ok"]


def test_a_kernel_that_hangs_is_not_tried_again() -> None:
    hang = Answer({}, "no answer within 20 s; killed", hung=True)
    found, asked = scripted({"e8p: M=1, 64 x 128": hang}, ["w4a16", "e8p"])
    by = states(found)
    assert by["e8p: M=1, 64 x 128"] == "hung"
    assert {by[k] for k in by if k.startswith("e8p") and k != "e8p: M=1, 64 x 128"} == {"skipped"}
    assert by[W4] == "measured" and asked.count(("check", "e8p: M=1, 64 x 128")) == 1


def test_kernels_of_another_chip_are_skipped_with_the_reason() -> None:
    facts = {"name": "An older chip", "capability": [8, 0]}
    found, asked = scripted({"facts": Answer(facts)}, ["fa3_fwd", "gemm_fp8_block", "w8a8"])
    for row in found["cases"]:
        if row["kernel"] == "w8a8":
            assert row["state"] in ("passed", "measured")
        else:
            assert row["state"] == "skipped" and "8.0" in row["reason"]
    assert {key.partition(":")[0] for _, key in asked if key} == {"w8a8"} and found["verdict"]["ok"]


def test_a_timed_result_unlike_the_baseline_s_is_wrong() -> None:
    parts = {"baselines": {"cuBLAS bf16": took(1e-3, differs=0.7)}}
    found, _ = scripted({W4: parts}, ["w4a16"])
    row = next(r for r in found["cases"] if r["key"] == W4)
    assert row["state"] == "failed" and "cuBLAS" in row["reason"] and not found["verdict"]["ok"]


def test_a_missed_must_is_not_ok_and_relations_are_worked_out() -> None:
    script = {
        "paged_decode: bf16 page 64, B16 L8k": {"ours": took(150e-6)},
        "paged_decode: fp8 page 64, B16 L8k": {"ours": took(100e-6)},
    }
    found, _ = scripted(script, ["paged_decode"])
    relation = next(r for r in found["relations"] if r["what"].startswith("FP8 KV"))
    assert relation["value"] == pytest.approx(1.5) and relation["goals"][0]["level"] == "below must"
    assert not found["verdict"]["ok"] and found["verdict"]["goals"]["below must"] >= 1


def test_an_interrupt_keeps_what_was_finished(tmp_path: Path) -> None:
    over: list[bool] = []

    def interrupt() -> Answer:
        over.append(True)
        return Answer({}, "stopped", stopped=True)

    found, asked = scripted(
        {"w4a16: M=50, 104 x 1152, fp16": interrupt},
        ["w4a16"],
        stopped=lambda: bool(over),
        save=lambda r: files.save(tmp_path, r),
    )
    kept = json.loads((tmp_path / files.RESULTS).read_text())
    assert kept["state"] == found["state"] == "interrupted"
    assert states(kept)["w4a16: M=1, 64 x 128"] == "passed"
    assert states(kept)[W4] == states(kept)["w4a16: M=50, 104 x 1152, fp16"] == "not reached"
    assert not any(do == "timed" for do, _ in asked)


def test_the_limit_ends_a_run_in_time() -> None:
    def late() -> Answer:
        time.sleep(0.7)
        return Answer({}, "stopped", stopped=True)

    found, _ = scripted({"w4a16: M=16, 4096^2, split-K": late}, ["w4a16"], limit=0.6)
    assert found["state"] == "out of time" and "not reached" in states(found).values()
    assert not found["verdict"]["ok"]


def test_the_report_stands_alone_escapes_and_has_every_case() -> None:
    parts = {"ours": took(9e-6), "baselines": {"cuBLAS bf16": took(32e-6)}, "call": took(1e-4)}
    hang = Answer({}, "no answer & <killed>", hung=True)
    found, _ = scripted({W4: parts, "e8p: M=5, 72 x 264, ragged": hang}, ["w4a16", "e8p", "paged_decode"])
    html = page.page(found)
    assert not re.search(r"https?://|<script|url\(|@import", html)
    assert "prefers-color-scheme: dark" in html and "default-src 'none'" in html
    assert "A &lt;chip&gt;" in html and "no answer &amp; &lt;killed&gt;" in html
    for row in found["cases"]:
        assert row["key"].replace("&", "&amp;") in html
    assert html.count("<rect") == sum(not g["of"] for r in found["cases"] for g in r["goals"] if g["value"])
    assert page.page({**found, "cases": [], "relations": [], "ceilings": {}})


def test_a_plan_needs_no_gpu_and_fits_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", "--plan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["key"] for row in found["cases"]} == {case.key for case in roster.chosen()}
    assert 0 < found["seconds"] < 400 and found["seconds"] == pytest.approx(sum(found["phases"].values()))
    assert main(["gpu-check", "--plan", "--only", "fa3_fwd"]) == 0
    shown = capsys.readouterr().out
    assert "hd128 causal 16k" in shown and "must 480" in shown and "w4a16" not in shown
    few, many = (planned(roster.chosen(), jobs)["seconds"] for jobs in (1, 16))
    assert few > many


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_check_is_refused_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu-check", "--json"]) == 6
    found = json.loads(capsys.readouterr().out)
    assert found["error"] == "KernelError" and "--plan" in found["hint"]


def test_a_folder_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match="cannot be written"):
        check(roster.chosen(["moe_align"]), tmp_path / "file", 60, 1, False, 0, on="cpu")


SCRIPT = """
import sys
from pathlib import Path
from workbench.cli.gpu_check import check
from workbench.kernels.bench import roster
found = check(roster.chosen(sys.argv[2:]), Path(sys.argv[1]), 100.0, 1, False, 3, on="cpu")
sys.exit(130 if found["state"] == "interrupted" else 0)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    def started(*only: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path), *only],
            env=environment, text=True, stderr=subprocess.PIPE,
        )  # fmt: skip

    return started


def test_a_real_child_proves_a_kernel_on_the_cpu(start: Callable[..., Any], tmp_path: Path) -> None:
    process = start("moe_align: one token", "decode_combine: one part", "decode_combine: 64k rows, 16 parts")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = json.loads((tmp_path / files.RESULTS).read_text())
    assert found["state"] == "done" and found["seed"] == 3
    assert sorted(states(found).values()) == ["passed", "passed", "waiting"]
    assert "moe_align: one token" in (tmp_path / files.REPORT).read_text()


def test_ctrl_c_keeps_what_was_proven(start: Callable[..., Any], tmp_path: Path) -> None:
    """The second case would take minutes in the interpreter; the interrupt comes while it runs."""
    process = start("fa_fwd: one token", "fa_fwd: hd128 GQA 8")
    results, until = tmp_path / files.RESULTS, time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        if results.exists() and "passed" in states(json.loads(results.read_text())).values():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    found = json.loads(results.read_text())
    assert found["state"] == "interrupted"
    assert sorted(states(found).values()) == ["not reached", "passed"]
    assert (tmp_path / files.REPORT).is_file()


def test_a_record_s_row_is_plain_data() -> None:
    cases = roster.chosen()
    assert cases
    for case in cases:
        assert json.loads(json.dumps(record.row_of(case), allow_nan=False))["key"] == case.key


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_kernel_is_measured_on_the_device(tmp_path: Path) -> None:
    found = check(roster.chosen(["decode_combine"]), tmp_path, 200, 2, True, None)
    assert found["state"] == "done" and found["verdict"]["states"].get("measured", 0) > 0
    assert all(row["state"] in ("passed", "measured") for row in found["cases"])
