"""Repetition loops in generated text, and where to cut them.

Small models answer greedily in circles. A head that was trained on circles is judged on circles, and looks
far better than it is: prompt lookup has that text for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

PERIOD = 48
REPEATS = 3
SHORTEST = 12


def cut_loops(
    ids: Sequence[int], period: int = PERIOD, repeats: int = REPEATS, shortest: int = SHORTEST
) -> int:
    """How many of ``ids`` to keep: up to the end of the first round of the first loop.

    A loop is a piece of at most ``period`` tokens that comes ``repeats`` times in a row, and at least
    ``shortest`` tokens in all. Everything is kept where there is none.

    >>> cut_loops([7, 8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    5
    """
    # runs[p]: how many tokens in a row, up to the present one, equal the token p before them
    runs = [0] * (period + 1)
    for i, token in enumerate(ids):
        for p in range(1, min(period, i) + 1):
            runs[p] = runs[p] + 1 if ids[i - p] == token else 0
            if runs[p] >= p * (repeats - 1) and runs[p] + p >= shortest:
                return i + 1 - runs[p]
    return len(ids)
