"""Reliability and second choices: bars are hand-counted shares, and the words say what is compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from workbench.core.output import Output
from workbench.core.report import Collected, build_run
from workbench.spec.events import DraftRecord, StepEvent
from workbench.widgets import views

# Two children of the root, two below the first: 0 and its second child are kept.
TREE = DraftRecord("r", (5, 6, 7, 8), (-1, -1, 0, 0), (0, 3), 3, "toy", "r3", chances=(0.5, 0.3, 0.5, 0.5))
SIDE = replace(TREE, accepted=(1,), emitted=2)


def run(*drafts: DraftRecord) -> Any:
    steps = [StepEvent(i, 0.0, 5, 0, 1, 4, 1, 0, {}, 0, 0, 0, {}, (d,)) for i, d in enumerate(drafts)]
    collected = Collected([Output(prompt="p", prompt_ids=(1,), sample=0)], steps, 0.0)
    return build_run(collected, None, "done", "interactive", {})


def test_bars_are_shares_of_the_nodes_of_a_bin_beside_their_mean_confidence() -> None:
    bars, said = views.to_figure("reliability", run(TREE, SIDE)).data
    assert list(bars.x) == ["0.2–0.4<br>n 6", "0.4–0.6<br>n 2"] and list(said.x) == list(bars.x)
    assert list(bars.y) == pytest.approx([2 / 6, 1 / 2]) and list(said.y) == pytest.approx([1.6 / 6, 0.5])
    assert said.line.dash == "longdash"
    # Wilson's interval of 1 of 2.
    assert list(bars.error_y.array)[1] == pytest.approx(0.4055, abs=1e-3)
    assert list(bars.error_y.arrayminus)[1] == pytest.approx(0.4055, abs=1e-3)


def test_the_words_add_up_promises_and_say_when_they_should_hold() -> None:
    table = views.to_table("reliability", run(TREE, SIDE))
    assert "accepted a round 1.30 predicted, 1.50 measured, rule r3, ○ exact. 2 rounds" in table.note
    rows = {row[0]: row[1:4] for row in table.rows}
    assert rows["0.4–0.6"] == (2, "50.0%", 1) and rows["0.8–1"] == (0, "–", 0)
    assert "Only under r3" not in table.note
    greedy = views.to_table("reliability", run(replace(TREE, rule="r1"), replace(TREE, chances=())))
    assert "Only under r3" in greedy.note and "1 draft tells no chances." in greedy.note


def test_a_drafter_that_gives_no_chances_has_no_bars() -> None:
    silent = run(replace(TREE, chances=()), replace(SIDE, chances=()))
    figure = views.to_figure("reliability", silent)
    assert not figure.data[0].x and "with a confidence" in figure.layout.title.text
    assert "2 drafts tell no chances." in views.to_table("reliability", silent).note


def test_second_choices_stand_on_first_ones_by_depth() -> None:
    figure = views.to_figure("choices", run(TREE, SIDE, replace(TREE, accepted=(), emitted=1)))
    first, other = figure.data
    assert figure.layout.barmode == "stack" and first.marker.pattern.shape != other.marker.pattern.shape
    assert list(first.y) == pytest.approx([1 / 3, 0]) and list(other.y) == pytest.approx([1 / 3, 1 / 3])
    table = views.to_table("choices", run(TREE, SIDE, replace(TREE, accepted=(), emitted=1)))
    assert table.rows == ((1, 1, "33.3%", 1, "33.3%", "measured"), (2, 0, "0.0%", 1, "33.3%", "measured"))
    assert "0.33 by first choices, 0.67 by others, rule r3, ○ exact (measured); 3 rounds" in table.note


def test_without_drafts_both_say_so() -> None:
    nothing = run()
    assert "Nothing was drafted" in views.to_table("choices", nothing).note
    assert "Nothing was drafted" in views.to_table("reliability", nothing).note
    assert "Nothing was drafted" in views.to_figure("choices", nothing).layout.title.text
