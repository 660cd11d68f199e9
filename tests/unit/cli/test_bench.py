"""``workbench bench``: who competes, what is refused, what an interrupt keeps. No time is asserted."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from workbench.cli import benching
from workbench.core.benchmark import BENCHES
from workbench.core.peers import PEERS
from workbench.spec.errors import Cancelled, JobFailed, OptionError, RecipeError, UnknownTechnique
from workbench.spec.recipe import Recipe

Command = Callable[..., Any]
SMALL = (
    "--model",
    "tiny",
    "--rounds",
    "1",
    "--size",
    "context=16",
    "--size",
    "tokens=2",
    "--cell",
    "b1_c512",
)


def test_contestants() -> None:
    assert benching.contestants([], None, []) == ()
    assert benching.contestants(["paged", "ngram"], None, []) == (Recipe(), Recipe.of("paged", "ngram"))
    three = benching.contestants(["rtn"], None, ["plain", "paged+kivi:bits=2"])
    assert three == (Recipe(), Recipe.of("paged", "kivi:bits=2"), Recipe.of("rtn"))
    with pytest.raises(RecipeError):
        benching.contestants([], None, ["paged+paged"])
    with pytest.raises(UnknownTechnique):
        benching.contestants([], None, ["plain", "nope"])
    with pytest.raises(OptionError):
        benching.contestants(["kivi:bits=3"], None, [])


def test_the_help_names_every_peer(workbench: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    said = workbench("bench", "--help").out
    assert all(name in said for name in PEERS)


@pytest.mark.parametrize("text", ["context", "=4", "context=-1", "context=x"])
def test_sizes_are_numbers(text: str) -> None:
    with pytest.raises(OptionError, match="NAME=N"):
        benching.sizes_of([text])


def test_a_run_in_this_process(workbench: Command) -> None:
    done = workbench("bench", "decode", *SMALL, "-u", "paged", "--here", "--json")
    assert done.status == 0 and done.json["state"] == "done"
    (run,) = done.json["runs"]
    assert run["kind"] == "bench" and run["provenance"]["profile"] == "interactive" and run["saved"]
    ratio = next(m for m in run["metrics"] if m["unit"] == "×")
    assert ratio["of"] == "plain" and ratio["tag"] == "measured"
    (listed,) = workbench("runs", "--json").json["runs"]
    assert (listed["kind"], listed["recipe"]) == ("bench", "decode: plain vs paged")
    assert "plain vs paged" in workbench("runs").out


def test_a_run_in_a_fresh_process_has_the_bench_profile(workbench: Command) -> None:
    done = workbench("bench", "decode", *SMALL, "--threads", "1", "--no-save", "--json")
    assert done.status == 0
    provenance = done.json["runs"][0]["provenance"]
    assert provenance["profile"] == "bench" and provenance["threads"] == 1
    assert provenance["environment"]["OMP_WAIT_POLICY"] == "active"


@pytest.mark.parametrize(
    "arguments",
    [["nope"], ["decode", "--cell", "nope"], ["decode", "--rounds", "0"], ["decode", "--contestant", "nope"]],
)
def test_what_does_not_exist_is_refused(workbench: Command, arguments: list[str]) -> None:
    done = workbench("bench", *arguments, "--model", "tiny", "--here", "--json")
    assert done.status == 2 and done.json["hint"]


@pytest.mark.parametrize("error", [Cancelled("stopped"), JobFailed("Benchmark", "its process ended with -2")])
def test_an_interrupt_keeps_what_was_finished(
    workbench: Command, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    real, asked = benching._run_one, []

    def second_is_interrupted(settings: Any, *rest: Any) -> Any:
        asked.append(settings.name)
        if len(asked) == 2:
            signal.raise_signal(signal.SIGINT)
            assert rest[-1](), "the first interrupt only asks"
            raise error
        return real(settings, *rest)

    monkeypatch.setattr(benching, "_run_one", second_is_interrupted)
    monkeypatch.setattr(
        "workbench.core.benchmark.BENCHES", {"decode": BENCHES["decode"], "batch": BENCHES["batch"]}
    )
    sizes = ("--size", "context=16", "--size", "tokens=2", "--size", "batch=1")
    done = workbench("bench", "--model", "tiny", "--rounds", "1", *sizes, "--here", "--json")
    assert done.status == 130 and done.json["state"] == "cancelled"
    assert asked == ["decode", "batch"] and [r["plan"]["bench"]["name"] for r in done.json["runs"]] == [
        "decode"
    ]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_failure_that_nobody_asked_for_is_a_failure(
    workbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise JobFailed("Benchmark", "its process ended with 1", traceback_text="what it said")

    monkeypatch.setattr(benching, "_run_one", broken)
    done = workbench("bench", "decode", "--model", "tiny", "--json")
    assert done.status == 1 and done.json["error"] == "JobFailed" and "what it said" in done.err


DRAFTERS = (
    "bench", "drafters", "--model", "tiny", "--prompts", "chat", "--batch", "1", "--batch", "2", "--weights",
    "unquantized", "--size", "prompts=2", "--size", "tokens=4", "--contestant", "ngram", "--here",
    "--no-save", "--dtype", "float32", "--cell", "chat_b1", "--cell", "chat_b2",
)  # fmt: skip


def test_drafters_are_compared_and_what_is_known_is_shown_again(workbench: Command) -> None:
    done = workbench(*DRAFTERS, "--json")
    assert done.status == 0, done.err
    bench = done.json["plan"]["bench"]
    assert [r["drafter"] for r in bench["rows"]] == ["ngram", "ngram"]
    assert bench["crossings"][0]["batches"] == [1, 2]
    said = workbench(*DRAFTERS, "--deadline", "0.001").out  # all of it is known
    assert "chat_b2: plain" in said and "2 of 2 turns" in said and "not measured" not in said
    assert "stops paying at a batch of" in said and "of 2 speed-ups predicted within 15%" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["drafters", "--peer", "transformers"],
        ["drafters", "--prompts", "nowhere"],
        ["drafters", "--weights", "ngram"],
        ["drafters", "--size", "rounds=3"],
        ["decode", "--prompts", "chat"],
        ["decode", "--deadline", "3"],
        ["kv_bars", "--batch", "2"],
    ],
)
def test_options_of_one_benchmark_are_refused_by_the_others(workbench: Command, arguments: list[str]) -> None:
    done = workbench("bench", *arguments, "--model", "tiny", "--here", "--json")
    assert done.status == 2 and done.json["hint"]
