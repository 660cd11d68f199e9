"""``workbench run``: text, numbers, records; what it says when something is wrong or someone interrupts."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.cli import generate
from workbench.records.store import RunStore
from workbench.spec.errors import Cancelled

Command = Callable[..., Any]
ASK = ("run", "--model", "tiny", "--raw", "--prompt", "def add(a, b):", "--max-tokens", "12")


def test_json_holds_everything_measured(workbench: Command) -> None:
    done = workbench(*ASK, "-u", "paged", "-u", "ngram", "--json", "--no-save")
    assert done.status == 0
    run = done.json
    assert run["state"] == "done" and run["text"] and 1 <= len(run["token_ids"]) <= 12
    assert run["recipe"] == [{"id": "paged"}, {"id": "ngram"}] and run["plan"]["kind"] == "exact"
    assert run["numerics"] == "fast" and run["dtype"] == "bfloat16" and run["path"]
    names = {m["name"] for m in run["metrics"]}
    assert {"ttft", "decode_speed"} <= names
    assert all(m["tag"] in ("measured", "predicted", "simulated", "claimed") for m in run["metrics"])
    assert run["memory"]["weights"] > 0
    assert run["saved"] is False and "steps" not in run


def test_text_is_streamed_then_numbers_with_tags(workbench: Command) -> None:
    told = workbench(*ASK, "-u", "ngram")
    whole = workbench(*ASK, "-u", "ngram", "--json").json
    assert told.status == 0
    assert told.out.startswith(whole["text"])
    for word in ("ttft", "measured", "weights", "code path", "numerics fast", "ngram (exact)", "acceptance"):
        assert word in told.out


def test_every_number_of_acceptance_is_told_with_its_meaning(workbench: Command) -> None:
    told = workbench(*ASK, "-u", "ngram", "--no-save").out
    assert "expected_sum" not in told and "expected_n" not in told
    rows = [line for line in told.partition("acceptance")[2].splitlines() if "measured" in line]
    assert len(rows) >= 8 and all(len(line.partition("measured")[2].split()) >= 2 for line in rows)


def test_the_same_seed_says_the_same(workbench: Command) -> None:
    sampled = (
        *ASK,
        "--temperature",
        "1",
        "--dtype",
        "float64",
        "--numerics",
        "pinned",
        "--json",
        "--no-save",
    )
    first = workbench(*sampled, "--seed", "5").json["token_ids"]
    assert workbench(*sampled, "--seed", "5").json["token_ids"] == first
    assert workbench(*sampled, "--seed", "6").json["token_ids"] != first


def test_several_samples_and_logprobs(workbench: Command) -> None:
    done = workbench(*ASK, "--n", "3", "--temperature", "1", "--logprobs", "2", "--json", "--no-save")
    outputs = done.json["outputs"]
    assert [o["sample"] for o in outputs] == [0, 1, 2]
    first = outputs[0]["tokens"][0]
    assert first["logprob"] < 0 and len(first["top_logprobs"]) == 2
    shown = workbench(*ASK, "--n", "2", "--temperature", "1", "--no-save").out
    assert "sample 0" in shown and "sample 1" in shown


def test_prompt_from_a_file_and_from_standard_input(
    workbench: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("def add(a, b):", encoding="utf-8")
    rest = ("--model", "tiny", "--raw", "--max-tokens", "12", "--json", "--no-save")
    expected = workbench(*ASK, "--json", "--no-save").json["token_ids"]
    assert workbench("run", "--prompt-file", file, *rest).json["token_ids"] == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    assert workbench("run", "--prompt-file", "-", *rest).json["token_ids"] == expected


def test_chat_is_the_default_where_there_is_a_template(workbench: Command) -> None:
    rest = ("--model", "tiny", "--prompt", "Hi", "--max-tokens", "1", "--json", "--no-save")
    chat = workbench("run", *rest).json["prompts"][0]
    assert chat == workbench("run", "--chat", *rest).json["prompts"][0] != "Hi"
    assert workbench("run", "--raw", *rest).json["prompts"] == ["Hi"]


def test_chat_without_a_template_says_so(
    workbench: Command, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    for path in model_folder("llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rest = ("--model", folder, "--prompt", "Hi", "--max-tokens", "2", "--json", "--no-save")
    asked = workbench("run", "--chat", *rest)
    assert asked.status == 0 and "no chat template" in asked.err
    assert asked.json["prompts"][0].endswith("Assistant:")
    assert workbench("run", *rest).json["prompts"] == ["Hi"]


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (["--prompt", "", "--raw"], 4, "EmptyPrompt"),
        ([], 4, "EmptyPrompt"),
        (["--prompt", "x", "--prompt-file", "y"], 4, "RequestError"),
        (["--prompt-file", "absent.txt"], 4, "RequestError"),
        (["--prompt", "x", "--top-p", "7"], 4, "SamplingError"),
        (["--prompt", "x", "--temperature", "nan"], 4, "SamplingError"),
        (["--prompt", "x " * 400, "--raw", "--max-context", "64"], 4, "PromptTooLong"),
        (["--prompt", "x", "--raw", "--max-context", "1"], 4, "PromptTooLong"),
        (["--prompt", "x " * 400, "--raw", "--kv-pool-tokens", "64", "-u", "paged"], 4, "CapacityError"),
        (["--prompt", "x", "-u", "kivi", "-u", "kv_fp8"], 2, "PlanError"),
        (["--prompt", "x", "-u", "prefix_cache"], 2, "PlanError"),
        (["--prompt", "x", "--device", "cuda:7"], None, None),
        (["--prompt", "x", "--device", "toaster"], None, None),
    ],
)
def test_bad_requests_are_refused_in_words(
    workbench: Command, arguments: list[str], status: int | None, error: str | None
) -> None:
    done = workbench("run", "--model", "tiny", "--no-save", "--json", *arguments)
    assert done.status not in (0, 1), done.json
    assert status in (None, done.status) and error in (None, done.json["error"])
    assert done.json["hint"], "every refusal says the way out"
    assert "to 0 tokens" not in done.json["hint"], "and one that can be taken"


def test_a_prompt_file_that_is_not_text(workbench: Command, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"\xff\xfe\x00")
    done = workbench("run", "--model", "tiny", "--prompt-file", file, "--json")
    assert done.status == 4 and "UTF-8" in done.json["message"]


def interrupt_when(monkeypatch: pytest.MonkeyPatch, moment: Callable[[Any], bool]) -> None:
    """A real Ctrl-C once ``moment(job)`` holds of the run that is waited for."""
    pump = generate._pump

    def interrupted(job: Any, *rest: Any) -> None:
        def person() -> None:
            while not moment(job) and not job.ended:
                time.sleep(0.001)
            signal.raise_signal(signal.SIGINT)

        threading.Thread(target=person, daemon=True).start()
        pump(job, *rest)

    monkeypatch.setattr(generate, "_pump", interrupted)


def test_interrupt_keeps_the_partial_run_marked_cancelled(
    workbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_when(monkeypatch, lambda job: bool(job.text))
    done = workbench(*ASK[:-1], "1500", "--ignore-eos", "--json")
    assert done.status == 130
    run = done.json
    assert run["state"] == "cancelled" and run["outputs"][0]["finish"] == "abort"
    assert 1 <= len(run["token_ids"]) < 1500 and run["saved"]


def test_interrupt_while_the_model_loads_stops_the_loading(
    workbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, stopped = threading.Event(), threading.Event()
    interrupt_when(monkeypatch, lambda job: loading.is_set())

    def endless(plan: Any, source: Any, progress: Any = None, cancel: Any = None) -> Any:
        loading.set()
        while not cancel():
            time.sleep(0.001)
        stopped.set()
        raise Cancelled("Building was cancelled.")

    monkeypatch.setattr("workbench.core.state.build_weights", endless)
    done = workbench(*ASK, "--json")
    assert done.status == 130 and done.json["error"] == "Cancelled" and stopped.is_set()


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.3, 0.5, 0.8, 1.2])
def test_an_interrupt_at_any_moment_ends_with_130_and_loses_nothing(seconds: float, store: Path) -> None:
    code = "import sys; from workbench.cli.start import main; print(end='\\n', flush=True); sys.exit(main())"
    command = [sys.executable, "-c", code, *ASK[:-1], "1900", "--ignore-eos", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.read(1)  # the interpreter has started
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    made = json.loads(out)
    if "error" not in made or made["error"] is None:  # it had begun: what there was is shown and kept
        assert made["state"] == "cancelled" and made["saved"]
        assert RunStore(store).get(made["id"]).token_ids == made["token_ids"]
    else:
        assert made["error"] == "Cancelled"


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals")
def test_a_real_interrupt_ends_a_streaming_run() -> None:
    command = [sys.executable, "-m", "workbench.cli.main", *ASK[:-1], "1900", "--ignore-eos", "--no-save"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "cancelled" in out and "weights" in out and "Traceback" not in err


def test_threads_reach_torch_before_it_is_loaded() -> None:
    command = [sys.executable, "-m", "workbench.cli.main", *ASK, "--threads", "1", "--json", "--no-save"]
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    provenance = json.loads(done.stdout)["provenance"]
    assert provenance["threads"] == 1 and provenance["environment"]["OMP_NUM_THREADS"] == "1"
