"""Devices that are not there, real tokens on a virtual clock; what inner layers foresee; the benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from workbench.core import placed_bench
from workbench.core.benchmark import BenchSettings, run_benchmark
from workbench.core.placed_virtual import Devices, reuse_surface, simulate_mirror, simulate_swiftspec
from workbench.core.session import Session
from workbench.spec.errors import OptionError, PlanError
from workbench.spec.plan import EngineLimits

TEXT = "def area(width, height):\n    return width"
SLOW = Devices(target=0.020, draft=0.002, link=0.001)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    limits = EngineLimits(kv_pool_tokens=512, max_context=128)
    with Session("tiny", limits=limits, dtype="float32") as made:
        yield made


def test_swiftspec_on_a_virtual_clock_gains_what_was_kept(session: Session) -> None:
    plain = session.generate(TEXT, max_tokens=16, ignore_eos=True)
    trace = simulate_swiftspec(session, TEXT, SLOW, layers=range(5), tokens=16)
    assert trace.tag == "simulated" and trace.emitted == len(plain.token_ids)
    assert trace.rounds and all(r.hit is not None for r in trace.rounds)
    steps = [s for s in trace.spans if s.side == "target"]
    assert all(s.end - s.start == pytest.approx(SLOW.target) for s in steps)
    # The whole model drafts for itself: several tokens a round, and most of its work is hidden.
    assert trace.wall < len(plain.token_ids) * SLOW.target and (trace.hidden() or 0) > 0.5
    again = simulate_swiftspec(session, TEXT, SLOW, layers=range(5), tokens=16)
    assert again == trace
    # A tree ages by every verdict that it foresees, and starts anew behind any other.
    assert "plain" not in [s.work for s in steps][1:-1] and trace.ages == tuple(r.age for r in trace.rounds)
    for before, after in pairwise(trace.rounds):
        assert after.age == ((before.age or 0) + 1 if before.hit else 0)
    assert 0 < sum(trace.ages) / len(trace.ages) < max(trace.ages)


def test_mirror_on_a_virtual_clock_has_two_rendezvous_a_round(session: Session) -> None:
    trace = simulate_mirror(session, TEXT, SLOW, layers=(0, 1, 4), exit_layers=4, gamma=2, kappa=2, tokens=16)
    assert trace.tag == "simulated" and trace.rounds
    assert {s.work for s in trace.spans} >= {"early", "late", "branches"}
    early = [s for s in trace.spans if s.work == "early"]
    assert all(s.end - s.start == pytest.approx(SLOW.target * 2 / 3) for s in early)
    assert len([s for s in trace.sent if s.what == "candidates"]) == len(trace.rounds)
    assert trace.hit_rate is not None and (trace.wasted or 0) > 0
    assert not trace.ages  # branches are made for one verdict


def test_more_candidates_foresee_no_less(session: Session) -> None:
    points = reuse_surface(session, [TEXT], exits=(1, 4), kappas=(1, 8), gamma=2, draft_layers=3, tokens=12)
    rates = {(p.exit, p.kappa): p.rate or 0.0 for p in points}
    assert set(rates) == {(1, 1), (1, 8), (4, 1), (4, 8)}
    assert all(rates[e, 1] <= rates[e, 8] for e in (1, 4)) and 0 < rates[4, 8] >= rates[1, 1]
    assert all(sum(n for _, n in p.by_accepted.values()) == p.verdicts > 0 for p in points)
    with pytest.raises(PlanError, match="exit"):
        reuse_surface(session, [TEXT], exits=(5,))


def test_a_surface_says_that_no_adapter_foresees(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    damaged = tmp_path / "heads" / "tiny" / "exit_adapter.safetensors"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"no head")
    points = reuse_surface(session, ["area"], exits=(1,), kappas=(1, 2), gamma=2, draft_layers=1, tokens=4)
    told = {note for p in points for note in p.notes}
    assert len(points) == 2 and len(told) == 1 and all(p.notes for p in points)
    (note,) = told
    assert note.startswith("mirror_sd foresees verdicts without a trained adapter") and str(damaged) in note


def test_times_that_cannot_be_are_refused() -> None:
    for wrong in ({"target": 0.0}, {"target": 1.0, "draft": -1.0}, {"target": 1.0, "exit": 2.0}):
        with pytest.raises(OptionError, match="cannot be"):
            Devices(**{"draft": 0.1, **wrong})
    assert SLOW.serial(2.0, 4) == pytest.approx(0.015) and SLOW.limit(2.0, 4) == pytest.approx(0.010)


def test_a_benchmark_of_two_places_goes_on_where_it_was_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    try:
        placed_bench.usable_cores()
    except OptionError:
        pytest.skip("there is one core")
    sizes = {"tokens": 6, "layers": 2, "context": 64}
    settings = BenchSettings("two_places", "tiny", rounds=1, sizes=sizes, dtype="float32")
    run = run_benchmark(settings)
    found = {m.name: m for m in run.metrics}
    assert all(found[f"c64:{n}"].value > 0 for n in run.plan["bench"]["contestants"])
    assert found["c64:swiftspec/inline_1"].of == "inline_1"
    assert {"c64:g_c", "c64:bound", "c64:mirror_sd:wasted", "c64:swiftspec:busy_draft"} <= set(found)
    assert "the draft: source=" in run.notes[1]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("what is known was measured again")

    monkeypatch.setattr(placed_bench, "start_drafter", never)
    again = {m.name: m.value for m in run_benchmark(settings).metrics if m.name.startswith("c64")}
    assert again == {n: m.value for n, m in found.items() if n.startswith("c64")}
    monkeypatch.setattr(placed_bench, "usable_cores", lambda: (_ for _ in ()).throw(OptionError("one core")))
    with pytest.raises(OptionError, match="one core"):
        run_benchmark(settings)
