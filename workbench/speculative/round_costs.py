"""What a round of speculation costs, in plain steps: verification v(T), drafting c, and what is added, o.

Taken from step events, so every millisecond of a round is in exactly one of the three:

    round = plain · (v(T) + draft(levels) + o)

v(T) = 1 + (forward of T rows - forward of a plain step) / plain; drafting is the *draft* phase; o is what all
other phases take more than in a plain step. The closed forms are in ``predict.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

import numpy as np

from workbench.spec.errors import RecordError
from workbench.spec.events import DraftRecord, StepEvent
from workbench.speculative.step_cost import Curve


@dataclass(frozen=True)
class RoundCosts:
    """``plain_ms``: a step of ``batch`` rows without drafts. ``forward``: milliseconds of a forward by rows.

    ``draft`` (start, per level) and ``overhead`` in plain steps; None where nothing was drafted.
    """

    batch: int
    plain_ms: float
    forward: Curve
    draft: tuple[float, float] | None
    overhead: float
    plain_steps: int
    rounds: int

    def verify(self, rows: float) -> float:
        """v of a step of ``rows`` rows, those of the batch included: 1 for a plain step."""
        return 1 + float(self.forward(rows) - self.forward(self.batch)) / self.plain_ms

    def drafting(self, levels: float) -> float:
        """Cost of a draft of so many levels, in plain steps."""
        start, each = self.draft or (0.0, 0.0)
        return start + each * levels if levels > 0 else 0.0

    def round(self, rows: float, levels: float) -> float:
        """A round with ``rows`` rows and a draft of ``levels`` levels, in plain steps."""
        return self.verify(rows) + self.drafting(levels) + self.overhead


def round_costs(drafted: Iterable[StepEvent], plain: Iterable[StepEvent] = ()) -> RoundCosts:
    """Costs of the decode steps in ``drafted``; ``plain`` are steps of a run without a drafter.

    Steps with prompts in them are left out, and those of another batch size than most. Raises
    :class:`RecordError` where no step without a draft is left: give those of a plain run.
    """
    every = [s for s in (*drafted, *plain) if s.decode and not s.prefill]
    if not every:
        raise RecordError("No step decoded.", hint="Generate something first.")
    sizes = [s.decode for s in every]
    batch = max(set(sizes), key=sizes.count)
    steps = [s for s in every if s.decode == batch]
    without = [s for s in steps if not s.draft]
    rounds = [s for s in steps if s.draft]
    if not without:
        raise RecordError(
            "Every step had a draft: nothing says what a plain step costs.",
            hint="Give the steps of a run without a drafter as well.",
        )
    plain_ms = median(s.total_ms for s in without)
    forward = Curve.of((s.rows, s.phase_ms.get("forward", 0.0)) for s in steps)
    rest = median(_rest(s) for s in without)
    return RoundCosts(
        batch=batch,
        plain_ms=plain_ms,
        forward=forward,
        draft=_line([(levels(s.drafts), s.phase_ms.get("draft", 0.0) / plain_ms) for s in rounds]),
        overhead=(median(_rest(s) for s in rounds) - rest) / plain_ms if rounds else 0.0,
        plain_steps=len(without),
        rounds=len(rounds),
    )


def levels(drafts: Iterable[DraftRecord]) -> int:
    """Depth of the deepest draft of a step."""
    return max((depth(d.parents) for d in drafts), default=0)


def depth(parents: tuple[int, ...]) -> int:
    """Levels of a tree below its root."""
    out: list[int] = []
    for p in parents:
        out.append(1 if p < 0 else out[p] + 1)
    return max(out, default=0)


def _rest(step: StepEvent) -> float:
    return step.total_ms - step.phase_ms.get("forward", 0.0) - step.phase_ms.get("draft", 0.0)


def _line(samples: list[tuple[int, float]]) -> tuple[float, float] | None:
    """(start, slope) through the medians by length, neither below 0; a single length is put on the slope."""
    by: dict[int, list[float]] = {}
    for length, cost in samples:
        by.setdefault(length, []).append(cost)
    if not by:
        return None
    x = np.array(sorted(by), dtype=np.float64)
    y = np.array([median(by[n]) for n in sorted(by)])
    if len(x) == 1:
        return 0.0, float(y[0] / max(x[0], 1.0))
    weights = np.sqrt([len(by[n]) for n in sorted(by)])
    slope, start = (float(v) for v in np.polyfit(x, y, 1, w=weights))
    if slope < 0:
        return float(np.average(y, weights=weights**2)), 0.0
    if start < 0:
        return 0.0, float((weights**2 * x * y).sum() / (weights**2 * x * x).sum())
    return start, slope
