"""How the GPU check measures, with the device's clock replaced: what is called, how often, what is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workbench.kernels.bench import ceilings, launches, roster, tasks, timing
from workbench.kernels.bench.case import Lab, Trial
from workbench.kernels.bench.timing import Timed

Calls = list[Sequence[Callable[[], object]]]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls that were to be measured; each is made once."""
    measured: Calls = []

    def measure(calls: Sequence[Callable[[], object]]) -> Timed:
        measured.append(calls)
        for call in calls:
            call()
        return Timed(1e-3, 9e-4, 2e-3, len(calls), "events")

    facts = SimpleNamespace(L2_cache_size=10_000)
    monkeypatch.setattr(timing, "measure", measure)
    monkeypatch.setattr(ceilings, "measure", measure)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    return measured


def merged(parts: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part in parts:
        out |= part
    return out


def test_a_case_its_variants_and_its_baselines_are_timed_on_rotating_inputs(clock: Calls) -> None:
    case = roster.find("w4a16: M=5, 72 x 256, centres per 32")
    small = replace(case, timed=True, variants={"no split-K": {"split": 1}})
    parts = list(tasks.timed(small, Lab(torch.device("cpu"), 1)))
    assert [p["armed"] for p in parts if "armed" in p] == [
        case.key,
        f"{case.key}, no split-K",
        f"{case.key}, cuBLAS bf16",
    ]
    found = merged(parts)
    sets = timing.copies(case.cost.bytes, 10_000)
    assert found["sets"] == sets > 1 and [len(c) for c in clock] == [sets] * 3
    inputs = {call.keywords["x"].data_ptr() for call in clock[0]}  # type: ignore[attr-defined]
    assert len(inputs) == sets
    assert found["ours"]["median"] == found["variants"]["no split-K"]["median"] == 1e-3
    assert 0 < found["baselines"]["cuBLAS bf16"]["differs"] < 5e-3


def test_a_baseline_that_cannot_run_says_why_and_the_rest_is_kept(clock: Calls) -> None:
    def refuse(**arguments: Any) -> dict[str, torch.Tensor]:
        raise RuntimeError("no such backend\non this chip")

    def make(lab: Lab) -> Trial:
        return Trial({"x": lab.normal(4)}, lambda x: {"y": x}, dict, baselines={"other": refuse})

    case = replace(roster.find("w4a16: M=1, 64 x 128"), make=make, sizes={}, timed=True)
    found = merged(tasks.timed(case, Lab(torch.device("cpu"), 1)))
    assert found["baselines"]["other"] == {"error": "RuntimeError: no such backend"}
    assert found["ours"]["repeats"] == found["sets"]


def test_ceilings_are_work_over_time_and_a_failing_one_is_only_missing(
    clock: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "SIDE", 64)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**16, 2**17))
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: (_ for _ in ()).throw(RuntimeError("not here")))
    found = ceilings.measured(torch.device("cpu"))
    assert found["bytes"]["rate"] == pytest.approx(2 * 2**14 / 1e-3)
    assert found["bf16"]["rate"] == found["fp8"]["rate"] == pytest.approx(2 * 64**3 / 1e-3)
    assert found["int8"]["error"] == "not here" and "rate" not in found["int8"]


@pytest.mark.parametrize(
    ("seconds", "captures", "how"),
    [(1e-3, True, "events"), (5e-5, True, "graph"), (5e-5, False, "events; no graph: not allowed")],
)
def test_short_calls_are_replayed_from_a_graph_where_that_works(
    seconds: float, captures: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graph(calls: Any, count: int) -> Timed:
        if not captures:
            raise RuntimeError("not allowed\nhere")
        return Timed(seconds / 2, 0, 0, 11, "graph")

    monkeypatch.setattr(timing, "events", lambda calls, count: Timed(seconds, 0, 0, count, "events"))
    monkeypatch.setattr(timing, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    called: list[int] = []
    found = timing.measure([lambda: called.append(1), lambda: called.append(2)])
    assert called == [1, 2] and found.by == how
    assert found.median == (seconds / 2 if how == "graph" else seconds)


def test_launches_are_compiled_only_or_remembered_and_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    ran: list[tuple[Any, ...]] = []

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        ran.append((self, arguments, grid, warmup, options))

    monkeypatch.setattr(JITFunction, "run", run)
    kernel = JITFunction.__new__(JITFunction)
    with launches.compile_only():
        kernel[(3,)](1, 2, num_warps=4)
    with launches.recorded() as seen:
        kernel[(5,)](7, flag=True)
    assert JITFunction.run is run
    seen()
    assert [r[1:] for r in ran] == [
        ((1, 2), (3,), True, {"num_warps": 4}),
        ((7,), (5,), False, {"flag": True}),
        ((7,), (5,), False, {"flag": True}),
    ]
