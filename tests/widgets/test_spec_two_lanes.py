"""Two places as lanes: what is drawn is the record's own, bubbles are where nobody works, the tag is said."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from workbench.core.placed_virtual import Reuse
from workbench.spec.errors import OptionError
from workbench.speculative.placement.timeline import MirrorTimes, mirror_timeline
from workbench.speculative.placement.trace import Round, Sent, Span, Trace, of_mirror
from workbench.widgets.spec_views.reuse import ReuseSurface
from workbench.widgets.spec_views.two_lanes import LANES, TwoLanes

MEASURED = Trace(
    "SwiftSpec",
    "measured",
    0.040,
    (
        Span("target", 0.000, 0.010, "verify", 5),
        Span("draft", 0.002, 0.006, "draft", 3, 4),
        Span("draft", 0.005, 0.008, "draft", 3, 4),  # as clocks go, it may begin a moment too early
        Span("target", 0.012, 0.030, "plain", 1),
    ),
    (Sent(0.010, 0.010, "draft", "verdict"), Sent(0.006, 0.007, "target", "drafts")),
    (Round(0.010, 4, 2, 3, True, 2),),
    plain=1,
)


def boxes(view: TwoLanes, kind: str) -> list[Any]:
    return [b for frame in view.lanes().frames for b in frame.boxes if b.kind == kind]


def test_work_bubbles_messages_and_verdicts_are_the_records() -> None:
    view = TwoLanes(MEASURED)
    lanes = view.lanes()
    assert lanes.lanes == LANES and "(measured)" in lanes.title
    assert [f.words for f in lanes.frames] == ["rounds 1 to 1, from 0 ms on"]
    (verify,) = boxes(view, "verify")
    assert (verify.lane, verify.start, verify.end) == (0, 0.0, 10.0) and "5 rows" in verify.words
    waits = {(b.lane, round(b.start, 3), round(b.end, 3)) for b in boxes(view, "wait")}
    assert waits == {(0, 10.0, 12.0), (0, 30.0, 40.0), (1, 0.0, 2.0), (1, 8.0, 40.0)}
    sent = boxes(view, "sent")
    assert len(sent) == 2 and all(b.end > b.start for b in sent)
    assert any("1 ms on its way" in b.words for b in sent)
    (hit,) = boxes(view, "hit")
    assert (hit.lane, hit.end, hit.label) == (3, 10.0, "3") and "2 of 4 kept" in hit.words
    assert hit.words.endswith("foreseen; tree of age 2")
    assert not boxes(view, "miss")
    assert MEASURED.busy("draft") == pytest.approx(0.006 / 0.040)
    assert MEASURED.hidden() == 1.0 and MEASURED.wasted == pytest.approx((8 - 2) / 4)
    for theme in ("auto", "light", "dark"):
        assert view.figure(theme).layout.title.text == lanes.title  # type: ignore[arg-type]
    assert {r["tag"] for r in view.table().to_dicts()} == {"measured"}
    older = replace(MEASURED, rounds=(*MEASURED.rounds, Round(0.02, 4, 0, 1, False, 3)))
    told = {r[""]: r["value"] for r in TwoLanes(older).table().to_dicts()}
    assert (told["age of the tree at a verdict, mean"], told["oldest tree"]) == (2.5, 3)


def test_a_long_record_is_cut_at_verdicts_and_says_what_is_left_out() -> None:
    times = MirrorTimes(early=0.006, late=0.004, branches=0.003, fresh=0.002, link=0.001)
    rounds = mirror_timeline([(i % 3 != 0, 2) for i in range(20)], times)
    trace = of_mirror(rounds, times, "Mirror", [{"window": 4, "rows": 9, "nodes": 60}] * 20)
    view = TwoLanes(trace, rounds=6, most=2)
    lanes = view.lanes()
    assert "simulated clock, real tokens" in lanes.title and "8 rounds more" in lanes.note
    assert [f.words.split(",")[0] for f in lanes.frames] == ["rounds 1 to 6", "rounds 7 to 12"]
    assert {b.kind for f in lanes.frames for b in f.boxes} == {
        "early", "late", "draft", "branches", "wait", "sent", "hit", "miss",
    }  # fmt: skip
    for frame in lanes.frames:
        for lane in (0, 1):
            own = sorted((b.start, b.end) for b in frame.boxes if b.lane == lane)
            assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(own))  # nobody does two things
    told = [b for f in lanes.frames for b in f.boxes if b.kind == "sent" and "candidates" in b.words]
    assert len(told) == 12 and all(b.end - b.start == pytest.approx(1.0) for b in told)
    assert len(view.figure().layout.sliders[0].steps) == 2
    rows = {r[""]: r for r in view.table().to_dicts()}
    assert rows["outcomes foreseen"]["value"] == pytest.approx(13 / 20)
    assert {r["tag"] for r in rows.values()} == {"simulated"} and "oldest tree" not in rows


def test_nothing_to_draw_is_said() -> None:
    with pytest.raises(OptionError, match="no step"):
        TwoLanes(Trace("x", "measured", 0.0, ())).figure()
    with pytest.raises(OptionError):
        ReuseSurface((), 5).figure()


def test_the_surface_shows_every_point_and_what_is_left_to_hide_behind() -> None:
    points = [
        Reuse(e, k, f, 10, {0: (f, 6), 2: (0, 4)}) for e, k, f in ((1, 1, 2), (1, 3, 4), (3, 1, 5), (3, 3, 9))
    ]
    view = ReuseSurface([*points, Reuse(2, 1, 0, 0, {})], 5)
    (heat,) = view.figure().data
    assert list(heat.x) == ["1", "2", "3"] and list(heat.y) == ["1", "3"]
    assert [list(row) for row in heat.z] == [[0.2, None, 0.5], [0.4, None, 0.9]]
    assert heat.customdata[0][2] == "40%"
    rows = view.table().to_dicts()
    assert rows[0]["foreseen"] == "20%" and rows[0]["0 kept"] == "33%" and rows[0]["2 kept"] == "0%"
    assert rows[-1]["foreseen"] == "–"
    told = [replace(p, notes=("No adapter foresees.",)) for p in points]
    assert ReuseSurface(told, 5).table().note == f"{view.table().note} No adapter foresees."


def test_what_the_record_has_to_say_is_below_the_picture_and_the_table() -> None:
    view = TwoLanes(replace(MEASURED, notes=("Drafted with other layers.",)))
    assert view.lanes().note == "Drafted with other layers."
    assert view.table().note.endswith("Drafted with other layers.")
    assert TwoLanes(MEASURED).lanes().note == ""
