"""What steps cost by their rows, measured apart from any drafter: the half of a prediction that is machine.

Rows are those of ``workbench.core.verify_cost``: drafts that are there for their rows alone, on random text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from workbench.core.drafters.turns import Step
from workbench.core.verify_cost import padded_room, padded_turns
from workbench.engine.engine import Engine
from workbench.spec.errors import OptionError
from workbench.spec.plan import EngineLimits
from workbench.speculative.step_cost import Curve

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
CONTEXT, ROUNDS = 128, 8


@dataclass(frozen=True)
class Costs:
    """Of a batch of ``batch``: medians (rows, forward ms, all other ms) of padded steps, plain ones first."""

    batch: int
    points: tuple[tuple[float, float, float], ...]

    @classmethod
    def of(cls, batch: int, steps: Iterable[Step]) -> Costs:
        """From padded steps; those without drafts have ``batch`` rows."""
        by: dict[int, list[Step]] = {}
        for step in steps:
            by.setdefault(step.rows, []).append(step)
        points = (
            (float(rows), median(s.forward for s in some), median(s.rest for s in some))
            for rows, some in sorted(by.items())
        )
        return cls(batch, tuple(points))

    @property
    def plain_ms(self) -> float:
        """A step without drafts."""
        return self.points[0][1] + self.points[0][2]

    @property
    def forward(self) -> Curve:
        """Milliseconds of a forward by rows; more rows never cost less."""
        return Curve.of((rows, ms) for rows, ms, _ in self.points)

    @property
    def rest(self) -> Curve:
        """Milliseconds of all else by rows: preparing, verifying, choosing, committing."""
        return Curve.of((rows, ms) for rows, _, ms in self.points)

    def verify(self, rows: float) -> float:
        """v: cost of a step whose forward has ``rows`` rows, in plain steps; 1 for ``batch`` rows."""
        curve = self.forward
        return 1.0 + float(curve(rows) - curve(self.batch)) / self.plain_ms

    def beside(self, rows: float) -> float:
        """What else such a step adds to a plain one, in plain steps."""
        curve = self.rest
        return float(curve(rows) - curve(self.batch)) / self.plain_ms

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Costs:
        """The costs of :meth:`to_dict`."""
        return cls(int(data["batch"]), tuple((float(r), float(f), float(o)) for r, f, o in data["points"]))


@dataclass(frozen=True)
class Padded:
    """How padded steps are measured: ``lengths`` of drafts behind ``context`` tokens, in ``slots`` slots."""

    batch: int
    lengths: tuple[int, ...]
    context: int
    slots: int
    limits: EngineLimits

    @classmethod
    def fitting(cls, batch: int, positions: int, page_size: int = 64) -> Padded:
        """All of :data:`LENGTHS`, or as many as a model of so many ``positions`` has room for."""
        context = min(CONTEXT, positions // 8)
        for most in range(len(LENGTHS), 1, -1):
            lengths = LENGTHS[:most]
            slots, limits = padded_room(lengths, batch, context, ROUNDS, page_size)
            if slots <= positions:
                return cls(batch, lengths, context, slots, limits)
        raise OptionError(
            f"A model of {positions} positions is too short for a batch of {batch}.",
            hint="Choose another model, or a smaller batch.",
        )

    def turns(self, engine: Engine) -> Iterator[list[Step]]:
        """Turns of padded steps; see :func:`workbench.core.verify_cost.padded_turns`."""
        asked = (self.lengths, self.batch, self.context, self.slots, ROUNDS, 0)
        for events in padded_turns(engine, *asked):
            yield [Step.of(e, 0) for e in events]
