"""Acceptance, lengths and time by round: what is drawn are the definitions' own numbers, hand-counted."""

from __future__ import annotations

from typing import Any

import pytest

from workbench.core.output import Output
from workbench.core.report import Collected, build_run
from workbench.spec.events import DraftRecord, StepEvent
from workbench.widgets import views


def record(n: int, kept: int, **more: Any) -> DraftRecord:
    return DraftRecord(
        "r", tuple(range(n)), tuple(range(-1, n - 1)), tuple(range(kept)), kept + 1, "toy", "r1", **more
    )


def step(number: int, *drafts: DraftRecord, decode: int = 1, **ms: float) -> StepEvent:
    n = sum(len(d.tokens) for d in drafts)
    return StepEvent(number, 0.0, decode + n, 0, decode, n, 1, 0, ms, 0, 0, 0, {}, drafts)


def run(*steps: StepEvent) -> Any:
    collected = Collected([Output(prompt="p", prompt_ids=(1,), sample=0)], list(steps), 0.0)
    return build_run(collected, None, "done", "interactive", {})


@pytest.fixture
def drafted() -> Any:
    """Three rounds of three drafts that kept 3, 1 and 0, one of two that kept both, and three plain steps."""
    ms = {"draft": 2.0, "forward": 10.0, "verify": 1.0, "schedule": 0.5}
    rounds = [step(i, record(3, kept), **ms) for i, kept in enumerate((3, 1, 0))]
    rounds.append(step(3, record(2, 2), **ms))
    return run(*rounds, *(step(4 + i, forward=8.0, sample=0.5, commit=0.5) for i in range(3)))


def test_acceptance_by_position_survival_and_conditional(drafted: Any) -> None:
    bars, marks = views.to_figure("acceptance", drafted).data
    assert list(bars.y) == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert list(marks.y) == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert "-open" in marks.marker.symbol  # told apart by more than colour
    assert "○ exact" in views.to_figure("acceptance", drafted).layout.title.text
    lossy = run(step(1, record(2, 1, mismatch=(0.25,)), forward=1.0))
    assert "◐ lossy" in views.to_figure("acceptance", lossy).layout.title.text
    assert "◐ lossy" in views.to_table("acceptance", lossy).note


def test_lengths_tell_a_rejection_from_the_end_of_the_draft(drafted: Any) -> None:
    whole, rejected = views.to_figure("lengths", drafted).data
    assert (list(whole.y), list(rejected.y)) == ([0, 0, 1, 1], [1, 1, 0, 0])
    assert views.to_table("lengths", drafted).rows == (
        (0, 1, "25%", 0, 1), (1, 1, "25%", 0, 1), (2, 1, "25%", 1, 0), (3, 1, "25%", 1, 0),
    )  # fmt: skip
    nothing = run(step(1, forward=1.0))
    assert "Nothing was drafted" in views.to_figure("lengths", nothing).layout.title.text


def test_every_millisecond_of_a_round_is_in_one_part(drafted: Any) -> None:
    figure = views.to_figure("round_time", drafted)
    parts = {t.name: list(t.y) for t in figure.data}
    assert parts["draft"] == [2.0] * 4 + [0.0] * 3
    assert parts["verification"] == [11.0] * 4 + [8.0] * 3
    assert parts["overhead"] == [0.5] * 4 + [1.0] * 3
    assert len({t.marker.pattern.shape for t in figure.data[:3]}) == 3
    assert parts["a plain step, 9 ms"] == [9.0, 9.0]
    rows = views.to_table("round_time", drafted).to_dicts()
    assert rows[0]["n"] == 4 and rows[0]["tokens each"] == (4 + 2 + 1 + 3) / 4
    assert rows[0]["ms a token"] == pytest.approx(4 * 13.5 / 10)
    assert rows[1]["ms a token"] == pytest.approx(9.0)


def test_the_plain_step_may_be_that_of_the_run_before(drafted: Any) -> None:
    only = run(step(1, record(2, 1), draft=1.0, forward=5.0))
    assert len(views.to_figure("round_time", only).data) == 3
    assert views.to_figure("round_time", drafted, only).data[3].name == "a plain step, 9 ms"


def test_a_batch_gains_a_token_for_every_sequence_without_a_draft() -> None:
    both = run(step(1, record(2, 1), decode=3, forward=6.0))
    assert views.to_table("round_time", both).to_dicts()[0]["tokens each"] == 4
