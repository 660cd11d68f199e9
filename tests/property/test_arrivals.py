"""Arrivals of tokens on random schedules: only the steps that every sequence shares are decode steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.core.benchmark_arrivals import Arrival, decode_turn
from workbench.spec.errors import JobFailed

LIVES = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8)), min_size=1, max_size=4)


@given(lives=LIVES, gap=st.floats(0.01, 2.0), lag=st.sampled_from([0.0, 1e-4]))
def test_the_decode_window_is_what_all_sequences_share(
    lives: list[tuple[int, int]], gap: float, lag: float
) -> None:
    """Sequence i gives a token in each of ``length`` steps from ``start`` on; callbacks may lag in a step.

    Where they lag, the order within a step is not known, and a sequence that ended may be missed by one step.
    """
    arrivals = [
        Arrival(step * gap + i * lag, i, 1)
        for step in range(max(start + length for start, length in lives))
        for i, (start, length) in enumerate(lives)
        if start <= step < start + length
    ]
    shared = min(start + length for start, length in lives) - 1 - max(start for start, _ in lives)
    together = len({start for start, _ in lives}) == len({sum(life) for life in lives}) == 1
    slack = 0 if together or not lag else 1
    try:
        turn = decode_turn(arrivals, len(lives))
    except JobFailed:
        assert shared < 1
        return
    steps = round(turn.seconds / gap)
    assert turn.seconds == pytest.approx(steps * gap, abs=1e-9)
    assert shared <= steps <= shared + slack and steps >= 1
    assert turn.amount == steps * len(lives)
