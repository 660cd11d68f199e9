"""The recorder of the emulator: a FlashAttention-3 block told event by event, the same every time."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch

from workbench.kernels.attention.fa3_fwd import fa3_fwd
from workbench.kernels.emulator import SCHEDULES, Emulator, Event, Flight, Recorder

TILES = 4
LATE = [s for s in SCHEDULES if s.products == "late"]


def recorded(schedule: Any, **switches: Any) -> Recorder:
    """One block of 128 queries over four KV tiles of 128."""
    recorder = Recorder()
    q, k, v = (torch.randn(n, 1, 64).bfloat16() for n in (128, 128 * TILES, 128 * TILES))
    emulator = Emulator(schedule, blocks=1, recorder=recorder)
    fa3_fwd(q, k, v, [128], [128 * TILES], causal=False, emulator=emulator, **switches)
    return recorder


def softmaxes(recorder: Recorder) -> list[Event]:
    """The exponentials of score tiles, without those of the 64 rescaling factors."""
    return [e for e in recorder.block(0) if e.kind == "exp2" and e.number > 64]


def under(event: Event, flights: list[Flight], own: bool) -> bool:
    return any(f.start < event.order < f.end for f in flights if (f.partition == event.partition) == own)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_product_and_copy_is_told_once_and_in_order(schedule: Any) -> None:
    events = recorded(schedule).block(0)
    assert [e.order for e in events] == list(range(len(events)))
    for consumer in (0, 1):
        mine = [e for e in events if e.partition == consumer]
        issued, retired = ([e.number for e in mine if e.kind == kind] for kind in ("issues", "retired"))
        assert issued == retired == list(range(1, 2 * TILES + 1))  # Q K and P V per tile
        assert [e.number for e in mine if e.kind == "exp2" and e.number > 64] == [64 * 128] * TILES
    copies, landed = ([e.what for e in events if e.kind == kind] for kind in ("copies", "landed"))
    assert sorted(copies) == sorted(landed) and len(copies) == 2 * TILES + 2
    assert {e.partition for e in events if e.kind in ("copies", "landed")} == {2}
    for event in events:
        if event.kind == "passes":
            before = [e for e in events[: event.order] if e.partition == event.partition]
            assert [e.what for e in before if e.kind == "waits"][-1] == event.what


@pytest.mark.parametrize("schedule", LATE, ids=str)
@pytest.mark.parametrize("early_wait", [True, False])
def test_all_but_the_first_softmax_stand_under_a_product_of_their_own(
    schedule: Any, early_wait: bool
) -> None:
    recorder = recorded(schedule, early_wait=early_wait)
    flights = recorder.flights(0)
    own = [under(e, flights, own=True) for e in softmaxes(recorder)]
    assert (own.count(True), own.count(False)) == (2 * (TILES - 1), 2)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_under_ping_pong_the_consumers_take_turns(schedule: Any) -> None:
    events = recorded(schedule).block(0)
    turns = [e for e in events if e.kind == "passes" and e.what.startswith("turn")]
    assert [e.partition for e in turns] == [0, 1] * TILES


def test_without_ping_pong_one_consumer_may_run_ahead() -> None:
    longest = 0
    for schedule in SCHEDULES:
        events = recorded(schedule, pingpong=False).block(0)
        assert not [e for e in events if e.what.startswith("turn")]
        runs = [len(list(g)) for _, g in groupby(e.partition for e in events if e.kind == "issues")]
        longest = max(longest, *runs)
    assert longest > 3


def test_a_schedule_is_told_the_same_twice_and_needs_no_recorder() -> None:
    assert recorded(SCHEDULES[4]).events == recorded(SCHEDULES[4]).events
    assert Emulator().recorder is None


def test_a_flight_lasts_until_a_wait_covers_it() -> None:
    recorder = Recorder()
    story = ("0 issues 1", "0 issues 2", "1 issues 1", "0 awaits 1", "1 awaits 1", "0 awaits 2")
    for partition, kind, number in map(str.split, story):
        recorder.note(0, int(partition), kind, number=int(number))  # type: ignore[arg-type]
    ends = {(f.partition, f.number): (f.start, f.end) for f in recorder.flights(0)}
    assert ends == {(0, 1): (0, 3), (0, 2): (1, 5), (1, 1): (2, 4)}
