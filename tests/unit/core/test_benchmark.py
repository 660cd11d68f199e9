"""Benchmarks: fair turns, honest clocks, typed errors. No test here asserts that anything is fast."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core.benchmark import BENCHES, BenchSettings, benchmark_steps, run_benchmark
from workbench.core.benchmark_engine import Decode, IdlePages, SharedPrefix, random_prompts
from workbench.core.benchmark_process import (
    _error,
    bench_environment,
    benchmark_in_fresh_process,
    settings_from_dict,
    settings_to_dict,
)
from workbench.core.benchmark_timing import Stopwatch, Turn, interleave, timing_metrics
from workbench.records.runfile import dumps, loads
from workbench.spec.errors import Cancelled, ModelNotFound, OptionError, PlanError
from workbench.spec.plan import Conflict
from workbench.spec.recipe import Recipe

TINY = {"context": 20, "tokens": 3, "batch": 2, "suffix": 4}


class Fixed:
    """A contestant of known speed that notes when it is asked."""

    def __init__(self, name: str, speeds: list[float], log: list[tuple[str, int]], note: str = "") -> None:
        self.name, self.speeds, self.log, self.note = name, speeds, log, note

    def turn(self, seed: int) -> Turn:
        self.log.append((self.name, seed))
        return Turn(1.0, self.speeds[seed])


def play(rounds: int, *contestants: Fixed) -> Any:
    return list(interleave(contestants, rounds))[-1]


# -- SMP-05 -------------------------------------------------------------------------------------------


def test_smp_05_the_first_call_is_excluded_and_reported_apart() -> None:
    timed = play(3, Fixed("a", [1000.0, 10, 20, 30], []))
    (metric,) = timing_metrics("cell", timed, "tok/s")
    assert (metric.value, metric.spread, metric.n) == (20, (10, 30), 3)
    assert "1000" in metric.note and "excluded" in metric.note


def test_smp_05_the_same_against_itself_is_one_and_known_ratios_come_out() -> None:
    drift = [1.0, 10, 7, 4, 2]  # a machine that slows down hurts both alike
    timed = play(4, Fixed("a", drift, []), Fixed("b", drift, []), Fixed("c", [3 * d for d in drift], []))
    found = {m.name: m for m in timing_metrics("x", timed, "ms")}
    assert found["x:b/a"].value == 1 and found["x:b/a"].spread == (1, 1)
    assert found["x:c/a"].value == pytest.approx(3) and found["x:c/a"].better == "higher"
    assert found["x:a"].unit == "ms" and found["x:a"].value == pytest.approx((1e3 / 7 + 1e3 / 4) / 2)


def test_smp_05_cpu_runs_make_no_cuda_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("a CUDA call"))
    with Stopwatch("cpu") as watch:
        time.sleep(0.01)
    assert watch.seconds >= 0.01


def test_smp_05_cuda_work_is_waited_for_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    with Stopwatch("cuda:0"):
        calls.append("work")
    assert calls == ["cuda:0", "work", "cuda:0"]


@pytest.mark.cuda
def test_smp_05_a_kernel_of_known_length_is_timed_whole() -> None:
    def spin() -> float:
        with Stopwatch("cuda") as watch:
            torch.cuda._sleep(int(2e8))
        return watch.seconds

    spin()
    pairs = sorted(spin() / spin() for _ in range(9))
    assert 0.9 <= pairs[4] <= 1.1
    with Stopwatch("cuda") as nothing:
        pass
    assert spin() > 20 * nothing.seconds


def test_what_is_said_of_a_contestant_stands_beside_its_number() -> None:
    timed = play(1, Fixed("a", [1, 2], [], note="4-bit weights"))
    (metric,) = timing_metrics("cell", timed, "tok/s")
    assert metric.note == "warm-up 1 tok/s, excluded; 4-bit weights"


# -- turns --------------------------------------------------------------------------------------------


def test_turns_interleave_rotate_and_share_their_inputs() -> None:
    log: list[tuple[str, int]] = []
    play(2, Fixed("a", [1] * 3, log), Fixed("b", [1] * 3, log))
    assert log == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2)]


def test_prompts_repeat_for_a_seed_and_differ_between_seeds() -> None:
    assert random_prompts(61, 2, 9, 4) == random_prompts(61, 2, 9, 4) != random_prompts(61, 2, 9, 5)
    assert all(0 <= t < 61 for p in random_prompts(61, 3, 50, 1) for t in p)


@pytest.mark.parametrize("uses", [(), ("paged", "ngram")])
def test_a_decode_turn_counts_the_tokens_of_its_steps(lab: ModuleType, uses: tuple[str, ...]) -> None:
    cell = Decode(
        "x", lab.make_engine(*uses, dtype="float32", numerics="fast"), batch=3, context=20, tokens=4
    )
    cell.turn(0)
    assert cell.steps == []  # the warm-up leaves no steps
    turn = cell.turn(1)
    assert len(cell.steps) == 4 and all(s.prefill == 0 and s.running == 3 for s in cell.steps)
    assert turn.amount >= 12 and (turn.amount == 12 or uses)
    assert not cell.engine.has_work and cell.engine.kv.pools[0].used == 0


def test_half_the_pool_is_cached_before_the_clock_starts(lab: ModuleType) -> None:
    engine = lab.make_engine("paged", "prefix_cache", dtype="float32", numerics="fast")
    IdlePages("x", engine, batch=1, context=128, tokens=3, share=0.5).turn(1)
    assert engine.kv.pools[0].cached >= engine.kv.pages // 2
    IdlePages("x", engine, batch=1, context=128, tokens=3, share=0.0).turn(1)
    assert engine.kv.pools[0].cached <= 3


def test_a_shared_prefix_is_found_from_the_second_turn_on(lab: ModuleType) -> None:
    engine = lab.make_engine("paged", "prefix_cache", dtype="float32", numerics="fast")
    cell = SharedPrefix("x", engine, context=128, suffix=5)
    cell.turn(0)
    prompt = random_prompts(61, 1, 128, 1_000_003)[0] + random_prompts(61, 1, 5, 1)[0]
    ran = lab.run_engine(engine, [prompt], max_tokens=1)
    assert ran.cached() == 128


# -- named benchmarks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHES)
def test_every_benchmark_gives_a_complete_run(name: str, model_folder: Callable[[str], Path]) -> None:
    sizes = {**TINY, "context": 96} if name in ("prefix", "idle_pages") else TINY
    told: list[tuple[float, float, str]] = []
    settings = BenchSettings(name, str(model_folder("llama")), rounds=1, sizes=sizes)
    run = run_benchmark(settings, lambda *t: told.append(t))
    assert run.kind == "bench" and run.state == "done" and loads(dumps(run)) == run
    timed = [m for m in run.metrics if m.unit in ("tok/s", "ms") and ":phase_" not in m.name]
    assert timed and all(m.value > 0 and m.tag == "measured" for m in timed)
    assert all(0 <= done <= total for done, total, _ in told) and told
    assert run.provenance is not None and run.provenance.profile == "interactive"
    if name in ("prefix", "idle_pages"):
        assert any(m.unit == "×" and m.of for m in run.metrics)
    if name == "overhead":
        assert any(m.name.endswith(":overhead") for m in run.metrics)


def test_recipes_and_peers_stand_side_by_side(model_folder: Callable[[str], Path]) -> None:
    recipes = (Recipe(), Recipe.of("paged", "kv_int8"))
    for name in ("decode", "batch", "prefill"):
        settings = BenchSettings(
            name,
            str(model_folder("llama")),
            recipes,
            ("transformers",),
            rounds=1,
            cells=(),
            sizes=TINY,
            dtype="float32",
        )
        ratios = {m.name.split(":")[1] for m in run_benchmark(settings).metrics if m.unit == "×"}
        assert ratios == {"paged+kv_int8/plain", "transformers/plain"}


def test_cells_too_long_for_the_model_are_left_out_and_said(model_folder: Callable[[str], Path]) -> None:
    settings = BenchSettings("decode", str(model_folder("llama")), rounds=1, sizes={"tokens": 1, "batch": 1})
    with pytest.raises(OptionError, match="256 positions"):
        run_benchmark(settings)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"name": "speed"}, OptionError),
        ({"cells": ("b9",)}, OptionError),
        ({"rounds": 0}, OptionError),
        ({"sizes": {"batch": 0}}, OptionError),
        ({"peers": ("someone",)}, OptionError),
        ({"model": "no-such-model"}, ModelNotFound),
        ({"recipes": (Recipe.of("prefix_cache"),)}, PlanError),
    ],
)
def test_wrong_settings_are_named(
    model_folder: Callable[[str], Path], wrong: dict[str, Any], error: type
) -> None:
    base: dict[str, Any] = {"name": "batch", "model": str(model_folder("llama")), "rounds": 1, "sizes": TINY}
    with pytest.raises(error):
        run_benchmark(BenchSettings(**{**base, **wrong}))


def test_a_benchmark_can_be_stopped_between_turns(model_folder: Callable[[str], Path]) -> None:
    turns: list[tuple[float, float]] = []
    steps = benchmark_steps(
        BenchSettings("batch", str(model_folder("llama")), rounds=50, sizes=TINY),
        lambda done, total, _: turns.append((done, total)),
    )
    next(steps)
    steps.close()
    with pytest.raises(StopIteration):
        next(steps)
    assert all(done < total / 2 for done, total in turns)  # most of the fifty rounds were never run


# -- a process of its own ---------------------------------------------------------------------------------


def test_settings_survive_the_way_to_the_process() -> None:
    settings = BenchSettings(
        "decode",
        "tiny",
        (Recipe.of("paged", "kivi:bits=2"),),
        ("transformers",),
        3,
        ("b1_c512",),
        {"tokens": 4},
    )
    back = settings_from_dict(settings_to_dict(settings))
    assert back.recipes == settings.recipes and back.peers == settings.peers and back.profile == "bench"
    assert back.chosen() == settings.chosen()


def test_the_bench_profile_is_set_before_torch_is_imported() -> None:
    env = bench_environment(threads=2)
    assert env["OMP_WAIT_POLICY"] == "active" and "hugetlb=1" in env["GLIBC_TUNABLES"]
    assert env["OMP_NUM_THREADS"] == "2"


def test_a_fresh_process_gives_the_run_of_the_bench_profile(model_folder: Callable[[str], Path]) -> None:
    told: list[str] = []
    settings = BenchSettings("batch", str(model_folder("llama")), rounds=1, sizes=TINY)
    run = benchmark_in_fresh_process(settings, threads=1, tell=lambda done, total, text: told.append(text))
    assert run.provenance is not None and run.provenance.profile == "bench" and told
    assert run.provenance.environment["OMP_WAIT_POLICY"] == "active" and run.provenance.threads == 1


def test_a_recipe_that_does_not_fit_says_the_same_from_another_process() -> None:
    conflicts = (Conflict("a", "b", "slot", "Switch off one of the two."),) * 2
    error = PlanError("They do not fit.", conflicts=conflicts)
    again = _error(error.to_dict())
    assert isinstance(again, PlanError) and again.exit_code == error.exit_code
    assert (again.message, again.hint) == ("They do not fit.", "Switch off one of the two.")


def test_its_errors_come_back_typed_and_it_can_be_cancelled(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ModelNotFound):
        benchmark_in_fresh_process(BenchSettings("batch", "no-such-model", sizes=TINY), threads=1)
    with pytest.raises(Cancelled):
        benchmark_in_fresh_process(
            BenchSettings("batch", str(model_folder("llama")), rounds=500, sizes=TINY),
            threads=1,
            cancel=lambda: True,
        )
