"""What a cell came to, drafter by drafter: speed-up, acceptance, time of a round, and the prediction of it.

The speed-up is that of all its prompts together: tokens a second over those of plain decoding. It is
predicted twice, each half of the prompts from the other, and the error is the mean of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from workbench.core.drafters.costs import Costs
from workbench.core.drafters.forecast import forecast, off, steps_of
from workbench.core.drafters.settings import PLAIN, Cell
from workbench.core.drafters.turns import Turn, same_outputs
from workbench.spec.errors import RecordError
from workbench.spec.run import Metric

BAR = 0.15
"""Within which a prediction should be."""
Turns = Mapping[str, Sequence[Turn]]


@dataclass(frozen=True)
class Row:
    """One drafter in one cell.

    ``speedup``: × of plain decoding, all prompts together; ``middle``, ``low``, ``high``: of single turns.
    ``share``: of steps with a draft; ``survival[i]``: of drafts that had more than i tokens kept.
    ``draft_ms``, ``forward_ms``, ``other_ms``: medians of steps with a draft, ``plain_ms`` of a plain step.
    ``same`` of ``prompts``: where the text was that of plain decoding, as far as both went. ``predicted`` and
    ``error`` (relative, mean of both halves) are None until both halves were measured. ``own_error``: the
    same, each half from itself, which leaves what the costs miss without how much prompts differ.
    """

    cell: str
    drafter: str
    turns: int
    prompts: int
    plain_rate: float
    speedup: float
    middle: float
    low: float
    high: float
    tau: float | None
    tokens_per_forward: float
    rate: float | None
    share: float
    survival: tuple[float, ...]
    draft_ms: float | None
    forward_ms: float | None
    other_ms: float | None
    plain_ms: float
    same: int
    predicted: float | None
    error: float | None
    own_error: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    def metrics(self) -> list[Metric]:
        """Its numbers, named ``cell:drafter/plain`` and ``cell:drafter:number``."""
        name, n = f"{self.cell}:{self.drafter}", self.turns
        out = [
            Metric(
                f"{name}/{PLAIN}", self.speedup, "×", n=n, spread=(self.low, self.high), of=PLAIN,
                better="higher", note=f"all prompts together; range of turns, their median {self.middle:.3f}",
            )
        ]  # fmt: skip
        if self.predicted is not None:
            note = "from other prompts and costs measured apart"
            out.append(Metric(f"{name}:predicted", self.predicted, "×", "predicted", of=PLAIN, note=note))
        told: tuple[tuple[str, float | None, str], ...] = (
            ("prediction_error", self.error, ""),
            ("prediction_error_own", self.own_error, ""),
            ("tau", self.tau, "tokens"),
            ("tokens_per_forward", self.tokens_per_forward, "tokens"),
            ("draft", self.draft_ms, "ms"),
            ("forward", self.forward_ms, "ms"),
            ("other", self.other_ms, "ms"),
        )
        out += [Metric(f"{name}:{what}", v, unit) for what, v, unit in told if v is not None]
        return out


def rows_of(
    cell: Cell, turns: Turns, halves: Sequence[int], costs: Costs, own_forward: Mapping[str, bool]
) -> list[Row]:
    """A row per drafter; ``halves`` says of which half each turn is. Plain decoding is among ``turns``."""
    plain = turns[PLAIN]
    out = []
    for name, mine in turns.items():
        if name == PLAIN or not _timed(mine, plain):
            continue
        each = [_rate(a) / _rate(b) for a, b in zip(mine, plain, strict=True) if a.steps and b.steps]
        said = predictions(mine, plain, halves, costs, own_forward.get(name, False))
        out.append(_row(cell, name, mine, plain, each, said))
    return out


def predictions(
    mine: Sequence[Turn], plain: Sequence[Turn], halves: Sequence[int], costs: Costs, own_forward: bool
) -> list[tuple[float, float, float]]:
    """Of each half: predicted from the other one, from itself, measured; empty unless both are there."""
    sides = [
        ([t for t, h in zip(mine, halves, strict=True) if h == side],
         [t for t, h in zip(plain, halves, strict=True) if h == side])
        for side in (0, 1)
    ]  # fmt: skip
    if not all(_timed(a, b) for a, b in sides):
        return []
    return [
        (
            forecast(*sides[1 - side], costs, own_forward=own_forward).speedup,
            forecast(*sides[side], costs, own_forward=own_forward).speedup,
            ratio(*sides[side]),
        )
        for side in (0, 1)
    ]


def ratio(mine: Sequence[Turn], plain: Sequence[Turn]) -> float:
    """Tokens a second of all turns over those of plain decoding."""
    return _rate(*mine) / _rate(*plain)


def _row(
    cell: Cell,
    name: str,
    mine: Sequence[Turn],
    plain: Sequence[Turn],
    each: Sequence[float],
    said: Sequence[tuple[float, float, float]],
) -> Row:
    steps = steps_of(mine)
    drafts = [d for t in mine for d in t.drafts]
    rounds = [s for s in steps if s.drafted]
    most = max((kept for _, kept, _ in drafts), default=0)
    drafted = sum(nodes for nodes, _, _ in drafts)
    return Row(
        cell=cell.label,
        drafter=name,
        turns=len(each),
        prompts=sum(len(t.outputs) for t in mine),
        plain_rate=1e3 * _rate(*plain),
        speedup=ratio(mine, plain),
        middle=median(each),
        low=min(each),
        high=max(each),
        tau=fmean(e for _, _, e in drafts) if drafts else None,
        tokens_per_forward=sum(s.tokens for s in steps) / (cell.batch * len(steps)),
        rate=sum(kept for _, kept, _ in drafts) / drafted if drafted else None,
        share=len(rounds) / len(steps),
        survival=tuple(fmean(kept > i for _, kept, _ in drafts) for i in range(most)),
        draft_ms=median(s.draft for s in rounds) if rounds else None,
        forward_ms=median(s.forward for s in rounds) if rounds else None,
        other_ms=median(s.rest for s in rounds) if rounds else None,
        plain_ms=median(s.ms for s in steps_of(plain)),
        same=sum(same_outputs(a, b) for a, b in zip(mine, plain, strict=True)),
        predicted=fmean(p for p, _, _ in said) if said else None,
        error=fmean(abs(off(p, m)) for p, _, m in said) if said else None,
        own_error=fmean(abs(off(own, m)) for _, own, m in said) if said else None,
    )


def _timed(*sides: Sequence[Turn]) -> bool:
    return all(any(t.steps for t in side) for side in sides)


def _rate(*turns: Turn) -> float:
    """Tokens per millisecond. Raises :class:`RecordError` where nothing was timed."""
    ms = sum(t.ms for t in turns)
    if ms <= 0:
        raise RecordError("No step was timed.", hint="Ask for more tokens.")
    return sum(t.tokens for t in turns) / ms
