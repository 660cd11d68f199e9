"""The surface and the run on it: made-up steps with known costs, predicted and measured told apart."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from workbench.spec.errors import RecordError
from workbench.spec.events import DraftRecord, StepEvent
from workbench.speculative import predict
from workbench.widgets.spec_views.speedup import ALPHAS, GAMMAS, operating_point


def step(number: int, gamma: int, kept: int = 0, alpha: float = 0.0) -> StepEvent:
    """10 ms a plain step, 8 of them its forward; 0.4 ms a row more, 1 ms a draft, 0.5 ms a verdict."""
    if not gamma:
        return StepEvent(number, 0.0, 1, 0, 1, 0, 1, 0, {"forward": 8.0, "sample": 2.0}, 0, 0, 0, {})
    ms = {"forward": 8.0 + 0.4 * gamma, "draft": 1.0 * gamma, "verify": 2.5}
    draft = DraftRecord(
        "r", (7,) * gamma, tuple(range(-1, gamma - 1)), tuple(range(kept)), kept + 1, "toy", "r2",
        expected=(alpha,) * min(kept + 1, gamma),
    )  # fmt: skip
    return StepEvent(number, 0.0, 1 + gamma, 0, 1, gamma, 1, 0, ms, 0, 0, 0, {}, (draft,))


def made(alpha: float, gamma: int, rounds: int = 4000) -> Any:
    rng = random.Random(5)
    kept = [next((i for i in range(gamma) if rng.random() >= alpha), gamma) for _ in range(rounds)]
    return operating_point(
        [step(i, gamma, k, alpha) for i, k in enumerate(kept)], [step(0, 0)] * 5, name="toy"
    )


def test_predictions_are_what_is_measured_when_the_assumptions_hold() -> None:
    point = made(0.7, 4)
    assert point.c == pytest.approx(0.1) and point.costs.verify(5) == pytest.approx(1.16)
    assert point.costs.overhead == pytest.approx(0.05)
    gain = predict.speedup(predict.expected_tokens(0.7, 4), 4, 1.16, 0.1, 0.05)
    assert point.predicted(point.iid) == pytest.approx(gain)
    assert point.measured == pytest.approx(gain, rel=0.02)  # drawn, not expected
    assert point.predicted(point.by_survival) == pytest.approx(point.measured, rel=1e-9)


def test_steps_without_a_draft_count_in_both() -> None:
    steps = [step(1, 3, 3, 0.9), step(2, 0), step(3, 0), step(4, 3, 1, 0.9)]
    point = operating_point(steps)
    assert (point.rounds, point.steps, point.tokens) == (2, 4, 8)
    assert point.measured == pytest.approx(10 / (2 * (9.2 + 3 + 2.5) + 20) * 8)
    assert point.predicted(point.by_survival) == pytest.approx(point.measured)
    assert "this run did in 2 of 4" in point.figure().layout.annotations[-1].text


def test_the_surface_is_the_closed_form() -> None:
    point = made(0.5, 2, rounds=50)
    z = point.surface(0.1)
    for g, a in ((0, 5), (3, 10), (1, 20)):
        tokens = predict.expected_tokens(ALPHAS[a], GAMMAS[g])
        cost = 1 + 0.04 * GAMMAS[g] + 0.1 * GAMMAS[g] + 0.05
        assert z[g][a] == pytest.approx(tokens / cost, rel=1e-6)


def test_the_best_gamma_is_where_the_surface_is_highest_and_none_where_nothing_pays() -> None:
    point = made(0.5, 2, rounds=50)
    line = next(t for t in point.figure().data if (t.name or "").startswith("best γ") and t.visible)
    z = point.surface(point.c)
    for i, gamma in enumerate(line.y):
        column = [row[i] for row in z]
        assert column[gamma - 1] == max(column) > 1 if gamma else max(column) <= 1
    assert line.y[0] is None and line.y[-1] == GAMMAS[-1]
    (told,) = [r for r in point.table().rows if r[0].startswith("best γ")]
    gamma, gain = point.best(0.5, point.c)
    assert told == ("best γ at this α and c", gamma, f"gains {gain:.2f}×", "predicted") and gain > 1


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_the_slider_changes_c_and_the_run_stays(theme: Any) -> None:
    point = made(0.6, 3, rounds=40)
    figure = json.loads(point.figure(theme).to_json())
    stops = figure["layout"]["sliders"][0]["steps"]
    (first,) = [s for s in stops if "as measured" in s["label"]]
    assert stops.index(first) == figure["layout"]["sliders"][0]["active"]
    for stop in stops:
        assert len(stop["args"][0]["visible"]) == len(figure["data"])
        assert sum(stop["args"][0]["visible"]) == 4 and stop["args"][0]["visible"][-1]
    star = figure["data"][-1]
    assert (star["x"], star["y"]) == (pytest.approx([0.6]), [3.0]) and star["name"].endswith("measured")
    assert "predicted" in figure["layout"]["title"]["text"]


def test_every_number_says_whether_it_was_measured() -> None:
    rows = made(0.6, 3, rounds=40).table().rows
    assert {r[-1] for r in rows} == {"measured", "predicted"}
    tags = {r[0]: r[-1] for r in rows}
    assert tags["speed-up"] == "measured" and tags["speed-up, survival and costs"] == "predicted"


def test_trees_have_no_single_alpha() -> None:
    draft = DraftRecord("r", (1, 2, 3), (-1, -1, 0), (0, 2), 3, "toy", "r3", expected=(0.5, 0.4))
    tree = StepEvent(1, 0.0, 4, 0, 1, 3, 1, 0, {"forward": 9.0}, 0, 0, 0, {}, (draft,))
    point = operating_point([tree], [step(0, 0)])
    assert point.iid is None and (point.gamma, point.nodes) == (2.0, 3.0)
    assert all("everywhere" not in r[0] or r[1] is None for r in point.table().rows)


def test_nothing_drafted_or_nothing_to_compare_with_says_the_way_out() -> None:
    with pytest.raises(RecordError, match="Nothing was drafted"):
        operating_point([step(1, 0)])
    with pytest.raises(RecordError, match="without a drafter"):
        operating_point([step(1, 2, 1, 0.5)])
