"""Streaming over a simulated link: exact clocks, decisions from the past, objectives kept by adapting."""

from __future__ import annotations

import math

import pytest

from workbench.kv.cachegen.link import BandwidthTrace, random_drops
from workbench.kv.cachegen.policy import TEXT, Adaptive, Fixed, Offer, Situation
from workbench.kv.cachegen.transfer import simulate, summary
from workbench.spec.errors import OptionError

MB = 1e6


def offers(n: int = 16, compute: float = 0.8) -> list[Offer]:
    """Chunks of three levels, decoded much faster than they are computed."""
    return [Offer((2_000_000, 1_500_000, 1_000_000), (0.03, 0.025, 0.02), 1280, compute)] * n


def test_bytes_arrive_as_the_trace_says():
    trace = BandwidthTrace((0.0, 1.0, 3.0, 4.0), (10.0, 0.0, 5.0, 20.0))
    assert trace.finish(0, 0) == 0 and trace.finish(0.5, 0) == 0.5
    assert trace.finish(0, 5) == 0.5
    assert trace.finish(0, 10) == 1.0
    assert trace.finish(0, 12.5) == 3.5  # nothing for two seconds
    assert trace.finish(2, 5) == 4.0
    assert trace.finish(3.5, 2.5 + 200) == 14.0
    assert BandwidthTrace.steady(4).finish(7, 8) == 9
    drop = BandwidthTrace.drop(10, 10, 2, 3)
    assert drop.finish(0, 20 + 3 + 10) == 6 and BandwidthTrace.drop(10, 10, 0, 3).finish(0, 13) == 4


@pytest.mark.parametrize(
    ("starts", "rates"),
    [
        ((), ()),
        ((1.0,), (1.0,)),
        ((0.0, 0.0), (1.0, 1.0)),
        ((0.0, 1.0), (1.0,)),
        ((0.0, math.inf), (1.0, 1.0)),
        *(((0.0,), (bad,)) for bad in (0.0, -1.0, math.nan, math.inf)),
    ],
)
def test_impossible_traces_are_refused(starts, rates):
    with pytest.raises(OptionError, match="trace"):
        BandwidthTrace(starts, rates)


def test_decoding_overlaps_the_next_transfer():
    chunks = [Offer((10,), (d,), 1, 9.0) for d in (2.0, 0.5, 0.5)]
    run = simulate(chunks, BandwidthTrace.steady(10), Fixed(0), slo=4)
    assert [s.arrived for s in run.sent] == [1, 2, 3]
    assert [s.ready for s in run.sent] == [3, 3.5, 4]  # the second and third wait for the first's decoding
    assert run.seconds == 4 and not run.late and run.nbytes == 30
    assert [s.estimate for s in run.sent] == [None, 10, 10]
    text = simulate(chunks, BandwidthTrace.steady(10), Fixed(TEXT), slo=4)
    assert text.seconds == pytest.approx(27.1) and text.late and text.choices == (TEXT,) * 3


def test_decisions_depend_on_the_past_only():
    """Two traces that agree until a moment lead to the same decisions until then."""
    same = BandwidthTrace.drop(10 * MB, 10, 1.0, 50)
    other = BandwidthTrace((0.0, 1.0, 1.5), (10 * MB, 80 * MB, 1 * MB))
    a, b = (simulate(offers(), t, Adaptive(), 4.0) for t in (same, other))
    until = [i for i, s in enumerate(a.sent) if s.begin <= 1.0]
    assert len(until) >= 4 and a.choices[: len(until)] == b.choices[: len(until)] and a.choices != b.choices


def test_the_least_lossy_level_that_meets_the_objective_is_taken():
    def chosen(rate: float, slo: float, text: str = "fallback", n: int = 10, compute: float = 0.8) -> int:
        return Adaptive(text=text).choose(Situation(tuple(offers(n, compute)), 0, 0, rate * MB, slo))

    assert chosen(10, 2.03) == 0  # 20 MB, and the last chunk's decoding
    assert chosen(10, 2.02) == 1
    assert chosen(10, 1.53) == 1 and chosen(10, 1.52) == 2
    assert chosen(10, 1.0, compute=0.05) == TEXT
    assert chosen(10, 9.0, "first") == TEXT and chosen(10, 7.0, "first") == 0
    # nothing meets it: whatever is ready first
    assert chosen(10, 0.5) == 2 and chosen(0.1, 0.5) == TEXT and chosen(0.1, 0.5, "never") == 2


def test_the_first_chunk_is_sent_at_the_medium_level():
    for start, expected in ((0, 0), (1, 1), (9, 2)):
        run = simulate(offers(1), BandwidthTrace.steady(MB), Adaptive(start=start), 60)
        assert run.choices == (expected,)


def test_quality_rises_with_bandwidth_and_falls_with_it():
    rich = simulate(offers(), BandwidthTrace.steady(50 * MB), Adaptive(), 4.0)
    assert set(rich.choices[1:]) == {0} and not rich.late
    poor = simulate(offers(), BandwidthTrace.steady(5 * MB), Adaptive(), 4.0)
    assert set(poor.choices[1:]) <= {1, 2} and not poor.late
    dead = simulate(offers(8, 0.4), BandwidthTrace.drop(20 * MB, 1000, 0.2, 500), Adaptive(), 5.0)
    assert TEXT in dead.choices


def test_a_tenfold_drop_is_survived_by_adapting_and_not_by_a_fixed_level():
    """The paper's working point: undisturbed, the finest level takes a third of the time of computing.

    The objective is not to be later than computing would be. The drop comes while the context is sent, and
    stays.
    """
    chunks = offers(13, 0.5)
    slo = sum(c.compute for c in chunks)
    rate = sum(c.sizes[0] for c in chunks) / (slo / 3)
    traces = random_drops(rate, begin=(0, slo / 3), seconds=(10 * slo, 10 * slo), n=400)
    runs = {
        name: [simulate(chunks, t, policy, slo) for t in traces]
        for name, policy in (("adaptive", Adaptive()), ("fixed", Fixed(0)), ("coarse", Fixed(2)))
    }
    late = {name: sum(r.late for r in found) / 400 for name, found in runs.items()}
    assert late["adaptive"] <= 0.05 and late["fixed"] >= 0.3 and late["adaptive"] < late["coarse"]
    metrics = {m.name: m for m in summary(runs["adaptive"])}
    assert metrics["slo_violations"].value == pytest.approx(100 * late["adaptive"])
    assert all(m.tag == "simulated" and m.n == 400 for m in metrics.values())
    low, high = metrics["load_seconds"].spread
    assert low <= metrics["load_seconds"].value <= high
    assert summary([]) == []


def test_a_reserve_trades_quality_for_slack():
    chunks = offers(16)
    traces = random_drops(20 * MB, begin=(0.1, 1.2), seconds=(0.3, 1.2), n=300)
    late, fine = [], []
    for reserve in (0.0, 0.5):
        runs = [simulate(chunks, t, Adaptive(text="never", reserve=reserve), 2.2) for t in traces]
        late.append(sum(r.late for r in runs))
        fine.append(sum(c == 0 for r in runs for c in r.choices))
    assert late[1] < late[0] and fine[1] < fine[0]
    for bad in ({"reserve": 1.0}, {"reserve": -0.1}, {"text": "maybe"}, {"start": -1}):
        with pytest.raises(OptionError, match="adapt"):
            Adaptive(**bad)


def test_text_is_not_sent_ahead_of_what_can_be_computed():
    """When nothing meets the objective, levels keep the link busy while text is computed."""
    chunks = [Offer((2_000_000, 1_000_000), (0.01, 0.01), 100, 1.5)] * 8
    run = simulate(chunks, BandwidthTrace((0.0, 0.05), (40 * MB, 0.5 * MB)), Adaptive(start=0), 5.0)
    assert run.late and {TEXT, 1} <= set(run.choices)
    assert run.seconds < min(
        simulate(chunks, BandwidthTrace((0.0, 0.05), (40 * MB, 0.5 * MB)), Fixed(c), 5.0).seconds
        for c in (0, 1, TEXT)
    )


def test_what_cannot_be_streamed_is_refused():
    with pytest.raises(OptionError):
        simulate([], BandwidthTrace.steady(1), Fixed(0), 1)
    with pytest.raises(OptionError):
        simulate(offers(), BandwidthTrace.steady(1), Fixed(0), 0)
    with pytest.raises(OptionError, match="level 5"):
        simulate(offers(), BandwidthTrace.steady(1), Fixed(5), 1)
    with pytest.raises(OptionError):
        Offer((), (), 1, 1)
    with pytest.raises(OptionError):
        Offer((1,), (1, 2), 1, 1)
    with pytest.raises(OptionError, match="negative"):
        Offer((1,), (-1,), 1, 1)
