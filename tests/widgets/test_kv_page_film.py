"""The film of page tables: what happened between two pictures, and that the boxes are the tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from workbench.core.session import Session
from workbench.engine.snapshot import GroupPages, PageSnapshot, SequencePages
from workbench.spec.errors import RecordError
from workbench.spec.recipe import Recipe
from workbench.widgets.kv_views import draw_bytes, watch_pages
from workbench.widgets.kv_views.page_film import PageFilm, films, holes

PROMPT = "def area(width, height): return width * height\n" * 3


def picture(step: int, *tables: tuple[int, tuple[int, ...]], cached: tuple[int, ...] = ()) -> PageSnapshot:
    sequences = tuple(SequencePages("r", i, filled, pages) for i, (filled, pages) in enumerate(tables))
    refs: dict[int, int] = {}
    for _, pages in tables:
        for page in filter(None, pages):
            refs[page] = refs.get(page, 0) + 1
    return PageSnapshot(step, (GroupPages(4, 20, sequences, refs, cached, ()),))


def told(film: PageFilm) -> list[tuple[int, str, int, tuple[int, ...]]]:
    return [(c.step, c.what, c.sequence, c.pages) for c in film.changes]


def test_fork_copy_growth_window_end_and_eviction_are_told_apart() -> None:
    film = films(
        [
            picture(1, (6, (1, 2)), (6, (1, 2))),
            picture(2, (7, (1, 3)), (7, (1, 2))),
            picture(3, (9, (1, 3, 4)), (8, (1, 2))),
            picture(4, (13, (0, 3, 4, 5)), (9, (1, 2, 6))),
            picture(5, (14, (0, 3, 4, 5)), cached=(1, 2)),
            picture(6, (15, (0, 3, 4, 5)), (6, (1, 7)), cached=()),
        ]
    )
    assert told(film) == [
        (1, "taken", 1, (1, 2)),
        (1, "shared", 2, (1, 2)),
        (2, "copied", 1, (2, 3)),
        (3, "taken", 1, (4,)),
        (4, "behind", 1, (1,)),
        (4, "taken", 1, (5,)),
        (4, "taken", 2, (6,)),
        (5, "ended", 2, ()),
        (5, "cached", 0, (1, 2)),
        (6, "hit", 2, (1,)),
        (6, "taken", 2, (7,)),
        (6, "evicted", 0, (2,)),
    ]


def test_a_sequence_that_starts_over_copies_nothing() -> None:
    film = films([picture(1, (9, (1, 2, 3))), picture(2, (4, (5,)))])
    assert film.count("copied") == 0 and told(film)[-1] == (2, "taken", 1, (5,))


def test_boxes_are_the_tables_and_holes_are_counted_once() -> None:
    film = films([picture(1, (6, (1, 3)), (6, (1, 2))), picture(2, (9, (0, 3, 4, 5)), (7, (1, 2)))])
    frame = film.lanes().frames[1]
    assert [(b.lane, b.start, b.end, b.kind, b.label) for b in frame.boxes] == [
        (0, 0, 4, "null", ""),
        (0, 4, 8, "held", "3"),
        (0, 8, 9, "held", "4"),
        (0, 9, 16, "hole", ""),
        (1, 0, 4, "held", "1"),
        (1, 4, 7, "held", "2"),
        (1, 7, 8, "hole", ""),
    ]
    shared = picture(1, (6, (1, 2)), (6, (1, 2)), (4, (1,)))
    assert holes(shared.groups[0]) == 2  # a shared page's empty slots are there once
    assert film.use().rows[0][1:5] == (5, 20, 12, 8)


def test_nothing_watched_says_the_way_out() -> None:
    with pytest.raises(RecordError, match="Generate inside"):
        PageFilm().lanes()
    with pytest.raises(RecordError, match="Generate inside"):
        PageFilm().use()


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    with Session("tiny", Recipe.of("paged:page_size=16", "prefix_cache"), dtype="float32") as session:
        yield session


def test_of_a_real_engine_copies_are_those_the_engine_counts(tiny: Any) -> None:
    with watch_pages(tiny) as film:
        run = tiny.generate(PROMPT + "def", n=3, max_tokens=20, temperature=0.8, ignore_eos=True)
        tiny.generate(PROMPT + "print", max_tokens=4, ignore_eos=True)
    engine = tiny._worker.state.engine
    assert film.count("copied") == engine.kv.copies == 2
    assert film.count("hit") == 1
    assert film.count("cached") == 2
    frames = len(film.snapshots)
    tiny.generate("a", max_tokens=2)
    assert len(film.snapshots) == frames  # nobody watches any more
    for snapshot in film.snapshots:
        for group in snapshot.groups:
            for seq in group.sequences:
                assert seq.filled <= len(seq.pages) * group.page_size
    figure = json.loads(film.figure("dark").to_json())
    assert "copies page" in figure["layout"]["sliders"][0]["steps"][1]["label"]
    assert len(film.figure().to_json()) < 400_000
    assert "measured" in film.table().to_text()
    assert run.memory["fragmentation"] > 0


def test_a_long_film_keeps_what_happened_and_few_frames(tiny: Any) -> None:
    with watch_pages(tiny) as film:
        tiny.generate(PROMPT, max_tokens=120, ignore_eos=True)
    lanes = film.lanes()
    assert len(film.snapshots) == 120 and len(lanes.frames) <= 33
    moments = {c.step for c in film.changes if c.what != "ended"}
    assert moments <= {int(f.words.split(":")[0].removeprefix("step ")) for f in lanes.frames} | {
        lanes_end(film)
    }


def lanes_end(film: PageFilm) -> int:
    """The step that ended the run: its picture has no sequence."""
    return film.snapshots[-1].step


def test_a_watcher_that_fails_is_not_silent(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: PageFilm, snapshot: Any) -> None:
        raise ValueError("no film")

    monkeypatch.setattr(PageFilm, "take", broken)
    with pytest.raises(ValueError, match="no film"), watch_pages(tiny):
        tiny.generate(PROMPT, max_tokens=2)


def test_windows_give_pages_back(model_folder: Any) -> None:
    recipe, folder = Recipe.of("paged:page_size=16"), str(model_folder("gemma3"))
    with Session(folder, recipe, dtype="float32") as session, watch_pages(session) as film:
        session.generate(list(range(3, 63)), max_tokens=30, ignore_eos=True)
    assert any(c.what == "behind" for c in film.changes)
    lanes = film.lanes()
    assert {"null", "held"} <= {b.kind for f in lanes.frames for b in f.boxes}
    assert len(lanes.lanes) == len(film.snapshots[0].groups) == 2


# -- bytes over time -------------------------------------------------------------------------------------


def test_areas_add_up_to_the_bytes_held(tiny: Any) -> None:
    run = tiny.generate(PROMPT, max_tokens=8, ignore_eos=True)
    drawn = draw_bytes(run, run, names=("first", "second"))
    figure = drawn.figure("light")
    per_run = len(figure.data) // 2
    for traces in (figure.data[:per_run], figure.data[per_run:]):
        sums = [sum(column) for column in zip(*(t.y for t in traces), strict=True)]
        held = [s["peak"] or s["bytes"] for s in run.steps]
        keys = ("kv_payload", "kv_meta", "fragmentation", "draft", "kv_cached")
        assert sums == pytest.approx([sum(h.get(k, 0) for k in keys) / 2**20 for h in held])
        times = traces[0].x
        assert list(times) == sorted(set(times))
    assert {figure.layout.yaxis.matches, figure.layout.yaxis2.matches} & {"y", "y2"}  # one scale
    own = drawn.figure(same_scale=False).layout
    assert own.yaxis.matches is None and own.yaxis2.matches is None
    text = drawn.table().to_text()
    assert "second" in text and "KV in use" in text and "measured" in text


def test_bytes_need_runs_and_a_name_each(tiny: Any) -> None:
    run = tiny.generate(PROMPT, max_tokens=1)
    with pytest.raises(RecordError, match="2 names"):
        draw_bytes(run, names=("a", "b"))
    with pytest.raises(RecordError, match="Run a prompt"):
        draw_bytes()
