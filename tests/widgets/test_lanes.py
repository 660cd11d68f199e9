"""Boxes on lanes: the figure's slider shows one frame, the front end gets plain data, nonsense is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from workbench.spec.errors import OptionError
from workbench.widgets.lanes import Box, Frame, Kind, Lanes

KINDS = (Kind("a", "solid", "#123456"), Kind("b", "hatched", "#654321", "/", hollow=True, dash=True))
FRAMES = (
    Frame("one", (Box(0, 0, 2, "a", "x", "says all"),)),
    Frame("two", (Box(0, 0, 3, "b"), Box(1, 1, 4.5, "a", "y")), rules=((6.0, "limit"),)),
)


def lanes(**more: Any) -> Lanes:
    given = {"title": "t", "x": "s", "lanes": ("first", "second"), "kinds": KINDS, "frames": FRAMES}
    return Lanes(**{**given, **more})


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_each_stop_of_the_slider_shows_the_boxes_of_one_frame(theme: Any) -> None:
    figure = lanes(first=1).figure(theme)
    stops = figure.layout.sliders[0].steps
    assert [s.label for s in stops] == ["one", "two"]
    for frame, stop in zip(FRAMES, stops, strict=True):
        shown = [
            t for t, on in zip(figure.data, stop.args[0]["visible"], strict=True) if on and t.type == "bar"
        ]
        drawn = {(t.y[i], t.base[i], t.base[i] + t.x[i], t.name) for t in shown for i in range(len(t.x))}
        names = {"a": "solid", "b": "hatched"}
        assert drawn == {(("first", "second")[b.lane], b.start, b.end, names[b.kind]) for b in frame.boxes}
    assert [t.visible for t in figure.data] == list(stops[1].args[0]["visible"])
    assert json.loads(figure.to_json())


def test_a_single_frame_needs_no_slider_and_every_lane_is_there() -> None:
    figure = lanes(frames=FRAMES[:1]).figure()
    assert not figure.layout.sliders
    assert list(figure.layout.yaxis.range) == [1.5, -0.5]


def test_the_words_of_a_rule_stand_above_the_boxes_and_below_the_legend() -> None:
    ruled, plain = lanes().figure(), lanes(frames=FRAMES[:1]).figure()
    (words,) = [t for t in ruled.data if t.type == "scatter" and t.text and "limit" in t.text]
    tall = ruled.layout.height - ruled.layout.margin.t - ruled.layout.margin.b
    assert words.textposition == "top center" and words.marker.opacity == 0
    room = (ruled.layout.legend.y - 1) * 146  # pixels of two lanes
    assert words.marker.size == 0.76 * 146 / 2 and tall == 146
    assert room >= 16 and ruled.layout.margin.t >= plain.layout.margin.t + room - 1


def test_kinds_differ_in_more_than_colour() -> None:
    marks = [t.marker.pattern.shape for t in lanes(frames=FRAMES[1:]).figure().data if t.type == "bar"]
    assert len(set(marks)) == len(marks)


def test_the_front_end_gets_plain_data_of_used_kinds() -> None:
    data = json.loads(json.dumps(lanes(frames=FRAMES[:1]).to_dict()))
    assert [k["key"] for k in data["kinds"]] == ["a"]
    assert data["frames"][0]["boxes"] == [[0, 0, 2, 0, "x", "says all"]]
    assert lanes().end == 6.0


def test_the_live_view_opens_at_the_frame_and_says_it_in_words_elsewhere() -> None:
    pytest.importorskip("anywidget")
    view = lanes(first=1).live()
    assert view.at == 1 and view.picture["frames"][1]["words"] == "two"
    assert view._repr_mimebundle_()["text/plain"] == "t: two"
    assert "innerHTML" not in view._esm
    view.close()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lanes": ()},
        {"frames": ()},
        {"first": 2},
        {"frames": (Frame("", (Box(0, 0, 1, "c"),)),)},
        {"frames": (Frame("", (Box(2, 0, 1, "a"),)),)},
    ],
)
def test_pictures_of_nothing_and_boxes_of_nowhere_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        lanes(**wrong)
