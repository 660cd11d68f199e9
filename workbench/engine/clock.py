"""Wall-clock of a step, split by phase; the phases add up to the step."""

from __future__ import annotations

from time import perf_counter

from workbench.spec.events import PHASES


class PhaseClock:
    """``clock("forward")`` ends a phase: the time since the last call is booked on it."""

    def __init__(self) -> None:
        self.start = self._last = perf_counter()
        self.ms = dict.fromkeys(PHASES, 0.0)

    def __call__(self, phase: str) -> None:
        """Book the time since the last call on ``phase``."""
        now = perf_counter()
        self.ms[phase] += (now - self._last) * 1e3
        self._last = now
