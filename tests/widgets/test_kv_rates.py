"""The rate-distortion plane: what is drawn, what is left out, and its table twin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.core.kv_methods import grid
from workbench.core.kv_runs import RatePoint
from workbench.spec.errors import RecordError
from workbench.widgets import kv_views
from workbench.widgets.kv_views.rate_curves import curves


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
    named = {t.name: t for t in figure.data if t.name}
    assert list(named) == ["not beaten in both", "kv_int8", "kivi", "kvtc", "now: kvtc:ratio=8"]
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"
    marks = {(t.marker.symbol, t.marker.color) for t in [*named.values()][1:]}
    assert len(marks) == 4 and len({s for s, _ in marks}) == 4
    kivi = named["kivi"]
    assert list(kivi.x) == [3.2, 5.3] and list(kivi.error_y.array) == pytest.approx([0.008, 0.26])
    assert named["kv_int8"].y == (None,) and any("left out" in a.text for a in figure.layout.annotations)
    whole = {t.name: t for t in drawn.figure(theme, "whole").data}
    assert list(whole["kivi"].x) == [1.6, 2.65]


def lines(points: list[RatePoint]) -> list[list[str]]:
    """The methods that are joined, line by line."""
    return [[p.method for p in line] for line in curves(points)]


def test_points_are_joined_along_one_option_only() -> None:
    texts = (
        "kvtc:k_ratio=16,v_ratio=16",
        "kvtc:ratio=4",
        "kvtc:ratio=8,window=16",
        "kvtc:entropy=range,ratio=8",
    )
    points = [point("kvtc", text, 4.0 + i, 0.1) for i, text in enumerate(texts)]
    assert lines(points) == [["kvtc:ratio=4", "kvtc:k_ratio=16,v_ratio=16"]]
    more = [*points, point("kvtc", "kvtc:ratio=8", 9.0, 0.1)]
    assert lines(more) == [
        ["kvtc:ratio=8,window=16", "kvtc:ratio=8"],
        ["kvtc:ratio=4", "kvtc:ratio=8", "kvtc:k_ratio=16,v_ratio=16"],
    ]


@pytest.mark.parametrize(
    ("methods", "joined"),
    [
        (("kivi", "kivi:bits=2", "kivi:bits=2, 4 exact"), [["kivi:bits=2", "kivi"]]),
        (("kv_fp4", "kv_fp4:format=mxfp4", "kv_fp4:rotate=true"), []),
        (("random", "random, 64 recent"), []),
        (
            ("cachegen:bins=64/32/24", "cachegen", "cachegen:delta=true", "cachegen:bins=16/10/8,delta=true"),
            [
                ["cachegen", "cachegen:bins=64/32/24"],
                ["cachegen:bins=16/10/8,delta=true", "cachegen:delta=true"],
            ],
        ),
        (
            ("kv_fp8+kvtc:ratio=8", "kv_fp8+kvtc:ratio=16", "kv_int8+kvtc:ratio=16"),
            [["kv_fp8+kvtc:ratio=8", "kv_fp8+kvtc:ratio=16"]],
        ),
        (("snapkv:keep=0.25", "snapkv:keep=0.25"), []),
    ],
)
def test_what_has_no_order_or_no_options_is_not_joined(
    methods: tuple[str, ...], joined: list[list[str]]
) -> None:
    named = [point("+".join(p.partition(":")[0] for p in m.split("+")), m, 2.0, 0.1) for m in methods]
    assert lines([replace(p, technique=p.technique.partition(",")[0]) for p in named]) == joined


def test_a_figure_draws_those_lines_in_the_methods_colour() -> None:
    texts = ("kvtc:ratio=8", "kvtc:ratio=16", "kvtc:ratio=8,window=16")
    figure = kv_views.draw_rates([point("kvtc", t, 8.0 + i, 0.1) for i, t in enumerate(texts)]).figure()
    (line,) = [t for t in figure.data if t.mode == "lines" and not t.name]
    (marks,) = [t for t in figure.data if t.name == "kvtc"]
    assert line.line.color == marks.marker.color and marks.mode == "markers" and len(marks.x) == 3
    assert [x for x in line.x if x is not None] == [10.0, 8.0, 8.0, 9.0]
    assert list(line.x).count(None) == 1


def test_no_two_methods_of_a_sweep_look_alike() -> None:
    ids = dict.fromkeys(u.id for r in grid() for u in r)
    figure = kv_views.draw_rates([point(i, i, 2.0 + n, 0.1) for n, i in enumerate(ids)]).figure()
    colours = [t.marker.color for t in figure.data if t.name in ids]
    assert len(colours) == len(ids) == len(set(colours))


def test_the_table_says_the_same() -> None:
    table = kv_views.draw_rates(POINTS).table()
    assert [row[0] for row in table.rows] == ["kv_int8", "kivi", "kvtc:ratio=16", "kivi:bits=2"]
    assert [row[7] for row in table.rows] == ["not beaten", "not beaten", "not beaten", ""]
    assert all(row[-1] == "measured" for row in table.rows)


def test_nothing_to_draw() -> None:
    with pytest.raises(RecordError, match="no point"):
        kv_views.draw_rates([])
