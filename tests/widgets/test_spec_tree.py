"""Draft trees: who stands where and why, what each node sees, live, stored and in words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from workbench.core.session import Session
from workbench.spec.errors import RecordError
from workbench.spec.events import DraftRecord, StepEvent
from workbench.spec.recipe import Recipe
from workbench.widgets.spec_views.badge import badge, judged_by, kind_of
from workbench.widgets.spec_views.draft_tree import of_steps, read_rounds, shown
from workbench.widgets.spec_views.layout import mask_of, nodes_of
from workbench.widgets.spec_views.stored import steps_of

# Two children of the root, three grandchildren: 0 and its second child are kept.
TREE = DraftRecord(
    "r", (5, 6, 7, 8, 9), (-1, -1, 0, 0, 1), (0, 3), 3, "toy", "r3", root=4, own=11,
    chances=(0.5, 0.25, 0.5, 0.75, 0.1),
)  # fmt: skip


def states(record: DraftRecord) -> list[str]:
    return [n.state for n in nodes_of(record, "", ("",) * len(record.tokens), "")]


def step(*drafts: DraftRecord, number: int = 1) -> StepEvent:
    return StepEvent(number, 0.0, 1, 0, 1, 1, 1, 0, {}, 0, 0, 0, {}, drafts)


def letters(ids: Any) -> str:
    return "".join(chr(96 + i) for i in ids)


def test_every_node_says_how_it_fared() -> None:
    assert states(TREE) == ["root", "accepted", "untried", "rejected", "accepted", "untried", "bonus"]
    none = replace(TREE, accepted=(), emitted=1)
    assert states(none) == ["root", "rejected", "rejected", "untried", "untried", "untried", "corrected"]
    assert states(replace(TREE, emitted=1)) == [
        "root", "accepted", "untried", "rejected", "cut", "untried", "cut",
    ]  # fmt: skip
    second = replace(TREE, accepted=(1,), emitted=2)
    assert states(second)[1:3] == ["rejected", "accepted"] and states(second)[-1] == "corrected"


def test_lines_keep_the_first_path_straight_and_no_two_nodes_share_a_place() -> None:
    nodes = nodes_of(TREE, "R", tuple("abcde"), "o")
    assert [(n.text, n.depth, n.line) for n in nodes] == [
        ("R", 0, 0), ("a", 1, 0), ("b", 1, 2), ("c", 2, 0), ("d", 2, 1), ("e", 2, 2), ("o", 3, 1),
    ]  # fmt: skip
    assert len({(n.depth, n.line) for n in nodes}) == len(nodes)
    assert nodes[1].words == "depth 1: 'a', drafted with 0.5; accepted"


def test_the_mask_is_the_ancestors_that_attention_uses() -> None:
    mask = mask_of(TREE)
    for i, row in enumerate(mask):
        seen, at = set(), i
        while at >= 0:
            seen.add(at)
            at = TREE.parents[at - 1] + 1 if at else -1
        assert {j for j, on in enumerate(row) if on} == seen


def test_rounds_in_words_figure_table_and_plain_data() -> None:
    made = of_steps([step(), step(TREE, number=7), step(replace(TREE, accepted=(), emitted=1))], letters)
    assert made.rounds[0].words == (
        "round 1 of 2, step 7: toy drafted 5, kept 2, then 'k' as a bonus; rule r3, ○ exact"
    )
    data = json.loads(json.dumps(made.to_dict()))
    assert data["first"] == 0 and data["rounds"][0]["nodes"][4][:6] == ["h", 1, 2, 1, "accepted", 0.75]
    assert data["rounds"][0]["mask"][4] == "110010"
    assert made.table().rows[0] == (7, 5, 3, 2, "e h", "k (bonus)")
    assert "2 of 10 drafted tokens kept" in made.table().note
    with pytest.raises(RecordError, match="Nothing was drafted"):
        of_steps([step()], letters)


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_each_stop_of_the_slider_shows_one_tree_and_its_mask(theme: Any) -> None:
    made = of_steps([step(TREE), step(replace(TREE, accepted=(), emitted=1))], letters)
    figure = json.loads(made.figure(theme).to_json())
    stops = figure["layout"]["sliders"][0]["steps"]
    assert [s["label"] for s in stops] == [r.words for r in made.rounds]
    for number, stop in enumerate(stops):
        on = [t for t, v in zip(figure["data"], stop["args"][0]["visible"], strict=True) if v]
        marks = sorted(
            (x, y) for t in on if "markers" in t.get("mode", "") for x, y in zip(t["x"], t["y"], strict=True)
        )
        assert marks == sorted((n.depth, n.line) for n in made.rounds[number].nodes)
        (mask,) = [t for t in on if t["type"] == "heatmap"]
        assert mask["z"] == [[int(v) for v in row] for row in made.rounds[number].mask]


def test_the_badge_is_what_the_verdicts_say() -> None:
    lossy = replace(TREE, mismatch=(0.5, 0.5), rule="typical")
    assert kind_of([TREE]) == "exact" and kind_of([TREE, lossy]) == "lossy"
    assert judged_by([TREE, lossy]) == "rule r3, typical, ◐ lossy"
    assert badge("simulated") == "◌ simulated"


def test_tokens_can_be_seen() -> None:
    assert shown(" the\n") == "·the⏎" and shown("") == "∅" and shown("a" * 30) == "a" * 13 + "…"


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    with Session("tiny", Recipe.of("paged", "suffix:tree=true", "verify"), dtype="float32") as session:
        yield session


def test_of_a_real_run_events_live_and_stored_draw_the_same(tiny: Any) -> None:
    events: list[StepEvent] = []
    stop = tiny.listen(lambda e: events.append(e) if isinstance(e, StepEvent) else None)
    run = tiny.generate("one two one three one two one three one", max_tokens=40, ignore_eos=True)
    stop()
    stored = replace(run, steps=tuple(json.loads(json.dumps(run.steps))))
    live = of_steps(events, lambda ids: tiny.tokenizer.decode(ids, skip_special=False), run.model)
    assert live.to_dict() == read_rounds(run).to_dict() == read_rounds(stored).to_dict()
    assert steps_of(stored)[-1].drafts == steps_of(run)[-1].drafts
    kept = [n.text for r in live.rounds for n in r.nodes if n.state in ("accepted", "bonus", "corrected")]
    assert "".join(kept) in run.text
    assert any(n.chance is not None for r in live.rounds for n in r.nodes)


def test_a_run_recorded_before_there_were_roots_is_drawn_without_them(tiny: Any) -> None:
    run = tiny.generate("one two one two one two", max_tokens=12, ignore_eos=True)
    rows = json.loads(json.dumps(run.steps))
    for row in rows:
        for draft in row["drafts"]:
            for name in ("root", "own", "chances"):
                del draft[name]
    old = read_rounds(replace(run, steps=tuple(rows)))
    assert old.rounds[0].nodes[0].text == "…" and old.rounds[0].nodes[-1].state != "bonus"
    del rows[-1]["drafts"][:], rows[0]["rows"]
    with pytest.raises(RecordError, match="has no rows"):
        read_rounds(replace(run, steps=tuple(rows)))


def test_the_live_view_opens_at_a_round_and_says_it_in_words_elsewhere() -> None:
    pytest.importorskip("anywidget")
    view = of_steps([step(TREE)], letters).live()
    assert view.at == 0 and view._repr_mimebundle_()["text/plain"].startswith("Draft trees, ○ exact")
    assert "innerHTML" not in view._esm
    view.close()
