"""Where rounds were drafted: as many marks as rounds, counts by exit, an error where none was drafted so."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.spec.errors import RecordError
from workbench.spec.events import DraftRecord, StepEvent
from workbench.widgets.spec_views import read_exits
from workbench.widgets.spec_views.draft_tree import of_steps


def draft(exit: int, n: int, kept: int) -> DraftRecord:
    tokens, parents = tuple(range(65, 65 + n)), tuple(range(-1, n - 1))
    return DraftRecord("r", tokens, parents, tuple(range(kept)), kept + 1, "layerskip", "r1", exit=exit)


def steps(*drafts: DraftRecord) -> list[StepEvent]:
    return [StepEvent(i, 0.0, 2, 0, 1, 1, 1, 0, {}, 0, 0, 0, {}, (d,)) for i, d in enumerate(drafts, 1)]


ROUNDS = steps(draft(1, 2, 2), draft(3, 4, 1), draft(1, 4, 0), draft(0, 3, 3))


def letters(ids: Any) -> str:
    return "".join(map(chr, ids))


def test_every_round_is_a_mark_at_its_exit() -> None:
    kept, lost = read_exits(ROUNDS).figure().data
    assert (list(kept.x), list(kept.y), list(kept.marker.size)) == ([1, 2], [1, 3], [10, 14])
    assert (list(lost.x), list(lost.y)) == ([3], [1]) and lost.marker.symbol == "circle-open"
    assert "○ exact" in read_exits(ROUNDS).title


def test_exits_are_counted() -> None:
    table = read_exits(ROUNDS).table()
    assert table.rows == ((1, 2, 3.0, "33%", 2.0, "measured"), (3, 1, 4.0, "25%", 2.0, "measured"))


def test_no_round_of_that_kind_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RecordError, match="Switch on LayerSkip"):
        read_exits(ROUNDS[3:])


def test_rounds_say_behind_which_layer_they_were_drafted() -> None:
    rounds = of_steps(ROUNDS, letters)
    words = [r.words for r in rounds.rounds]
    assert "drafted 4 behind layer 3, kept 1" in words[1] and "behind" not in words[3]
    assert rounds.table().columns[1] == "exit layer" and [row[1] for row in rounds.table().rows] == [
        1,
        3,
        1,
        0,
    ]
    assert "exit layer" not in of_steps(ROUNDS[3:], letters).table().columns
