"""The rate-distortion plane: what is drawn, what is left out, and its table twin."""

from __future__ import annotations

import pytest

from workbench.core.kv_runs import RatePoint
from workbench.spec.errors import RecordError
from workbench.widgets import kv_views


def point(technique: str, method: str, codec: float, kl: float) -> RatePoint:
    return RatePoint(technique, method, codec, codec / 2, kl, (kl / 2, kl * 2), 1.0, 99.0, 5)


POINTS = [
    point("kv_int8", "kv_int8", 1.94, 0.0),
    point("kivi", "kivi", 3.2, 0.008),
    point("kivi", "kivi:bits=2", 5.3, 0.26),
    point("kvtc", "kvtc:ratio=16", 18.5, 0.016),
]


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_techniques_the_frontier_and_the_live_point(theme: str) -> None:
    drawn = kv_views.draw_rates(POINTS, live=point("kvtc", "kvtc:ratio=8", 9.2, 0.005))
    figure = drawn.figure(theme, "codec")
    names = [t.name for t in figure.data]
    assert names == ["not beaten in both", "kv_int8", "kivi", "kvtc", "now: kvtc:ratio=8"]
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"
    marks = {(t.marker.symbol, t.marker.color) for t in figure.data[1:]}
    assert len(marks) == 4 and len({s for s, _ in marks}) == 4
    kivi = figure.data[2]
    assert list(kivi.x) == [3.2, 5.3] and list(kivi.error_y.array) == pytest.approx([0.008, 0.26])
    assert figure.data[1].y == (None,) and any("left out" in a.text for a in figure.layout.annotations)
    assert list(drawn.figure(theme, "whole").data[2].x) == [1.6, 2.65]


def test_the_table_says_the_same() -> None:
    table = kv_views.draw_rates(POINTS).table()
    assert [row[0] for row in table.rows] == ["kv_int8", "kivi", "kvtc:ratio=16", "kivi:bits=2"]
    assert [row[7] for row in table.rows] == ["not beaten", "not beaten", "not beaten", ""]
    assert all(row[-1] == "measured" for row in table.rows)


def test_nothing_to_draw() -> None:
    with pytest.raises(RecordError, match="no point"):
        kv_views.draw_rates([])
