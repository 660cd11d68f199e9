"""Costs of rounds: made-up steps with known costs come out as those; every millisecond counts once."""

import random

import numpy as np
import pytest

from workbench.spec.errors import RecordError
from workbench.spec.events import DraftRecord, StepEvent
from workbench.speculative.round_costs import depth, round_costs
from workbench.speculative.step_cost import Curve


def step(rows, decode=1, nodes=0, prefill=0, **ms):
    draft = DraftRecord("r", tuple(range(nodes)), tuple(range(-1, nodes - 1)), (), 1, "toy", "r1")
    return StepEvent(
        1, 0.0, rows, prefill, decode, nodes, decode, 0, ms, 0, 0, 0, {}, (draft,) if nodes else ()
    )


def made(gamma, forward=10.0, jitter=0.0, rng=random.Random(1)):  # noqa: B008
    """A round: 10 ms a forward and 0.5 ms a row more, 1 + 2 ms a drafted token, 3 ms of verification."""
    noise = 1 + jitter * rng.uniform(-1, 1)
    if not gamma:
        return step(1, forward=forward * noise, sample=1.0, schedule=0.5)
    ms = {"forward": (forward + 0.5 * gamma) * noise, "draft": 1 + 2.0 * gamma, "verify": 4.0}
    return step(1 + gamma, nodes=gamma, schedule=0.5, **ms)


def test_known_costs_come_back_in_plain_steps():
    costs = round_costs([made(g) for g in (0, 1, 2, 4, 8) for _ in range(5)])
    assert costs.plain_ms == pytest.approx(11.5)
    assert costs.verify(1) == 1 and costs.verify(5) == pytest.approx(1 + 2.0 / 11.5)
    assert costs.verify(17) == pytest.approx(1 + 8.0 / 11.5)  # beyond what was seen: the last slope
    assert costs.draft == pytest.approx((1 / 11.5, 2 / 11.5))
    assert costs.overhead == pytest.approx(3 / 11.5)
    for gamma in (1, 4, 8):
        round_ms = made(gamma).total_ms
        assert costs.round(1 + gamma, gamma) * costs.plain_ms == pytest.approx(round_ms)


def test_medians_stand_against_a_step_that_was_disturbed():
    steps = [made(g, jitter=0.05) for g in (0, 4) for _ in range(30)]
    steps += [step(1, forward=900.0), step(5, nodes=4, forward=900.0, draft=50.0)]
    costs = round_costs(steps)
    assert costs.plain_ms == pytest.approx(11.5, rel=0.06)
    assert costs.verify(5) == pytest.approx(1 + 2.0 / 11.5, rel=0.06)
    assert (costs.plain_steps, costs.rounds) == (31, 31)
    assert costs.drafting(4) == pytest.approx(9 / 11.5, rel=0.06) and costs.drafting(0) == 0


def test_plain_steps_of_another_run_are_what_is_compared_with():
    drafted = [made(4) for _ in range(3)]
    with pytest.raises(RecordError, match="without a drafter"):
        round_costs(drafted)
    assert round_costs(drafted, [made(0)] * 3).plain_ms == pytest.approx(11.5)
    with pytest.raises(RecordError, match="No step decoded"):
        round_costs([step(8, decode=0, prefill=8, forward=30.0)])


def test_steps_of_another_batch_size_are_left_out():
    steps = [step(4, decode=4, forward=12.0)] * 6 + [step(1, forward=8.0)] * 2
    steps += [step(12, decode=4, nodes=2, forward=16.0, draft=1.0)] * 3
    costs = round_costs(steps)
    assert (costs.batch, costs.plain_ms, costs.verify(4)) == (4, 12.0, 1.0)
    assert costs.verify(12) == pytest.approx(16 / 12)


def test_costs_of_a_tree_go_by_its_levels():
    assert depth(()) == 0
    assert depth((-1, -1, 0, 0, 2)) == 3


def test_a_curve_never_falls_and_goes_on_beyond_its_end():
    curve = Curve.of([(1, 10.0), (2, 9.0), (4, 12.0), (4, 14.0), (4, 13.0)])
    assert curve(np.array([1.0, 2.0])).tolist() == [9.5, 9.5]
    assert float(curve(4)) == 13.0 and float(curve(6)) == pytest.approx(13 + 3.5)
