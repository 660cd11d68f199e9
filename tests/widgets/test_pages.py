"""The pages view: what each cell says, of made-up tables and of a real engine's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from workbench.core.session import Session
from workbench.engine.snapshot import GroupPages, PageSnapshot, SequencePages
from workbench.spec.errors import RecordError
from workbench.spec.events import StepEvent
from workbench.spec.recipe import Recipe
from workbench.widgets import Panel
from workbench.widgets.collect import LiveRun
from workbench.widgets.kv_views.page_changes import Change
from workbench.widgets.views import pages


def test_a_cell_says_whose_it_is_how_full_and_whether_it_is_open() -> None:
    sequences = (SequencePages("a", 0, 24, (1, 2)), SequencePages("a", 1, 20, (1, 4)))
    group = GroupPages(16, 10, sequences, {1: 2, 2: 1, 4: 1}, (5,), (2,))
    shown = {c.page: c for c in pages.cells(group)}
    assert [(c.label, c.state) for c in shown.values()] == [
        ("×2", "held"), ("1", "held"), ("", "free"), ("2", "held"), ("", "cached"),
    ]  # fmt: skip
    assert (shown[1].filled, shown[2].filled, shown[4].filled) == (1.0, 0.5, 0.25)
    assert shown[2].open
    assert shown[1].words == "page 1: sequences 1, 2, 100% filled"
    table = pages.table((PageSnapshot(3, (group,)),))
    assert table.rows == ((1, 0, 24, 2, 1, 1, 0, 8), (2, 0, 20, 2, 1, 0, 0, 12))
    assert "3 of 10 pages held, 1 of them shared and 1 open; 1 cached, 6 free" in table.note
    many = GroupPages(16, 4000, (SequencePages("a", 0, 16000, tuple(range(1, 1001))),), {}, (), ())
    assert len(pages.cells(many)) == pages.MAX_CELLS


def test_pages_given_back_behind_a_window_are_not_held() -> None:
    group = GroupPages(16, 10, (SequencePages("a", 0, 60, (0, 0, 3, 4)),), {3: 1, 4: 1}, (), ())
    assert [(c.page, c.state) for c in pages.cells(group)] == [
        (1, "free"), (2, "free"), (3, "held"), (4, "held"),
    ]  # fmt: skip
    assert pages.cells(group)[3].filled == 0.75
    assert pages.table((PageSnapshot(3, (group,)),)).rows == ((1, 0, 60, 2, 0, 0, 2, 4),)


def test_the_panel_shows_pages_live_as_a_figure_and_as_a_table(panel: Any) -> None:
    with pytest.raises(RecordError):
        panel.to_figure("pages")
    panel.run().wait(10)
    assert panel.flush()
    live = panel._gui.live.pages
    assert live["groups"][0]["cells"][0][:2] == ["held", "×2"]
    assert live["table"]["rows"][0][0] == "1"
    figure = json.loads(panel.to_figure("pages", theme="dark").to_json())
    assert "engine step 7" in figure["layout"]["title"]["text"]
    assert "page 1: sequences 1, 2" in figure["data"][0]["customdata"][0]
    assert len(panel.to_table("pages")) == 2


def test_the_figure_has_every_kv_group_and_the_cells_say_what_was_copied() -> None:
    whole = GroupPages(16, 10, (SequencePages("a", 0, 40, (1, 2, 7)),), {1: 1, 2: 1, 7: 1}, (), ())
    windowed = GroupPages(16, 10, (SequencePages("a", 0, 40, (0, 2, 3)),), {2: 1, 3: 1}, (), ())
    picture = PageSnapshot(9, (whole, windowed))
    figure = json.loads(pages.figure((picture,)).to_json())
    assert len(figure["data"][0]["customdata"]) == 7 + 3
    told = [a["text"] for a in figure["layout"]["annotations"]]
    assert [t.split(":")[0] for t in told] == ["Group 0", "Group 1"]
    copied = Change(8, 0, "copied", 1, (3, 7), "sequence 1 copies page 3 to 7")
    drawn = pages.drawn(picture, (copied,))
    assert [row[6] for row in drawn["groups"][0]["cells"]] == [False] * 6 + [True]
    assert drawn["groups"][0]["cells"][6][5].endswith("a copy of page 3")
    assert drawn["changes"] == ["step 8: sequence 1 copies page 3 to 7"]
    assert drawn["table"]["rows"][1][6] == "1"  # given back behind the window


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    with Session("tiny", dtype="float32") as session:
        yield session


@pytest.mark.parametrize(
    ("recipe", "samples"), [(Recipe(), 1), (Recipe.of("paged:page_size=16", "prefix_cache"), 3)]
)
def test_of_a_real_engine_the_books_balance(tiny: Any, recipe: Recipe, samples: int) -> None:
    panel = Panel(tiny, recipe=recipe, sampling={"max_tokens": 24, "n": samples, "ignore_eos": True})
    panel.run("Why is the sky blue? " * 4).result(60)
    (group,) = panel._controller.live.pages.groups
    assert len(group.sequences) == samples or len(group.sequences) == 1  # before, or after the prompt forks
    counted: dict[int, int] = {}
    for seq in group.sequences:
        assert len(seq.pages) * group.page_size >= seq.filled > 0
        for page in seq.pages:
            counted[page] = counted.get(page, 0) + 1
    assert counted == group.refs
    assert not set(group.cached) & set(group.refs)
    assert 0 not in group.refs
    assert tiny.pages() is None  # not on the worker's thread
    panel.close()


def _looked(looks: list[int], step: int, group: GroupPages) -> PageSnapshot:
    looks.append(step)
    return PageSnapshot(step, (group,))


@pytest.mark.parametrize("seconds", [0.05, 0.4, 3.0])
def test_what_stays_on_screen_is_no_older_than_a_tenth_of_the_run(seconds: float) -> None:
    steps = 500
    live = LiveRun("", "", 0.0, steps, "exact", str)
    group = GroupPages(16, 4, (SequencePages("r", 0, 16, (1,)),), {1: 1}, (), ())
    looks: list[int] = []
    for i in range(1, steps + 1):
        event = StepEvent(i, seconds * i / steps, 1, 0, 1, 0, 1, 0, {}, 1, 0, 3, {})
        live.look_at_pages(event, partial(_looked, looks, i, group))
    assert live.pages.step >= 0.9 * steps - 1
    assert len(looks) <= max(60, seconds * 12 + 60)


def test_the_panel_sees_samples_fork_and_copy_although_both_are_over_at_once(tiny: Any) -> None:
    recipe = Recipe.of("paged:page_size=16")
    with Panel(tiny, recipe=recipe, sampling={"max_tokens": 6, "n": 3, "ignore_eos": True}) as panel:
        panel.run("def area(width, height): return width").result(60)
        live = panel._controller.live
        what = [c.what for c in live.changes]
        assert what.count("shared") == 2 and what.count("copied") == 2
        prompt = live.steps[0].prefill
        assert prompt % 16  # only a page that is not full has to be copied
        copied = [c for c in live.changes if c.what == "copied"]
        assert {c.pages[0] for c in copied} == {prompt // 16 + 1}
