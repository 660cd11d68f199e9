"""The overlap view: what it counts follows from the kernel's source, and what it draws is what it counted."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.spec.errors import OptionError
from workbench.widgets.kernel_views.overlap import Overlap, record_overlap

TILES = 4


@pytest.fixture(scope="module")
def overlap() -> Overlap:
    return record_overlap(TILES, seed=1)


def test_every_softmax_but_the_first_has_its_own_product_in_flight(overlap: Overlap) -> None:
    for told in (*overlap.with_turns, *overlap.without):
        assert (told.beside_own, told.softmaxes) == (2 * (TILES - 1), 2 * TILES)
        assert 0 < told.beside_other <= told.softmaxes


def test_ping_pong_keeps_the_warpgroups_a_tile_apart(overlap: Overlap) -> None:
    assert {t.lead for t in overlap.with_turns} == {1}
    assert max(t.lead for t in overlap.without) > 1


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
@pytest.mark.parametrize("pingpong", [True, False])
def test_bars_are_the_spans_and_softmax_stands_within_the_product(
    overlap: Overlap, pingpong: bool, theme: Any
) -> None:
    figure = overlap.figure(theme, pingpong=pingpong)
    assert "simulated" in figure.layout.title.text and "not time" in figure.layout.annotations[0].text
    bars: dict[str, list[tuple[int, int]]] = {}
    for trace in figure.data:
        for lane, start, length in zip(trace.y, trace.base, trace.x, strict=True):
            bars.setdefault(lane, []).append((start, start + length))
    assert {lane: len(found) for lane, found in bars.items()} == dict.fromkeys(bars, TILES)
    assert len(bars) == 8
    for group in (0, 1):
        softmaxes, products = bars[f"warpgroup {group}: softmax"], bars[f"warpgroup {group}: P V"]
        scores = bars[f"warpgroup {group}: Q K"]
        for (begin, end), (issued, waited) in zip(softmaxes[1:], products, strict=False):
            assert issued < begin < end <= waited
        assert all(s[1] <= m[0] for s, m in zip(scores, softmaxes, strict=True))


def test_the_table_is_tagged_and_says_what_it_counts(overlap: Overlap) -> None:
    rows = overlap.table().to_dicts()
    assert [r[""] for r in rows] == ["with ping-pong", "without"]
    assert {r["softmax beside its own P V"] for r in rows} == {f"{2 * (TILES - 1)} of {2 * TILES}"}
    assert {r["tag"] for r in rows} == {"simulated"}


def test_one_tile_has_nothing_to_overlap() -> None:
    with pytest.raises(OptionError, match="At least 2"):
        record_overlap(1)
    with pytest.raises(OptionError, match="schedules 0 to"):
        record_overlap(2, drawn=99)


def test_without_triton_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.spec.errors import MissingExtra

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="gpu"):
        record_overlap(2)
