"""Interleaved timing: contestants take turns in one process, so that a drifting machine hurts all alike.

The first turn of each contestant is a warm-up: excluded, and reported apart. The order rotates from round to
round. Ratios are taken within a round, between neighbours in time, and quoted as median and range. Device
work is waited for on CUDA; a CPU run makes no CUDA call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Literal, Protocol

import torch

from workbench.spec.run import Metric


@dataclass(frozen=True)
class Turn:
    """One turn: ``amount`` of work done in ``seconds``."""

    seconds: float
    amount: float


class Contestant(Protocol):
    """Something that takes turns; it times itself, so that its own preparation stays outside."""

    @property
    def name(self) -> str:
        """Short name, as in the metrics."""
        ...

    @property
    def note(self) -> str:
        """What a reader must know of it beside its name, e.g. the precision it computes in; may be empty."""
        ...

    def turn(self, seed: int) -> Turn:
        """Do one turn of work on inputs drawn from ``seed``: the same for every contestant of a round."""
        ...


@dataclass
class Timed:
    """The turns of one contestant; ``first`` is the warm-up, ``turns`` one per round."""

    name: str
    first: Turn
    turns: list[Turn] = field(default_factory=list)
    note: str = ""


class Stopwatch:
    """``with Stopwatch(device) as w: …`` then ``w.seconds``: waits for the device at both ends."""

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = device.startswith("cuda")
        self._device = device
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._wait()
        self._start = perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        self._wait()
        self.seconds = perf_counter() - self._start

    def _wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._device)


def interleave(
    contestants: Sequence[Contestant],
    rounds: int,
    on_turn: Callable[[int, str], None] = lambda done, name: None,
) -> Iterator[list[Timed]]:
    """Warm up, then ``rounds`` rounds; yields what there is after every turn, so that a caller may stop."""
    out: list[Timed] = []
    done = 0
    for contestant in contestants:
        on_turn(done, contestant.name)
        out.append(Timed(contestant.name, contestant.turn(0), note=contestant.note))
        done += 1
        yield out
    for number in range(rounds):
        shift = number % len(contestants)
        for i in [*range(shift, len(contestants)), *range(shift)]:
            on_turn(done, contestants[i].name)
            out[i].turns.append(contestants[i].turn(number + 1))
            done += 1
            yield out


def timing_metrics(cell: str, timed: Sequence[Timed], unit: Literal["tok/s", "ms"]) -> list[Metric]:
    """Metrics of one cell: each contestant, its warm-up, and its ratio to the first one.

    ``tok/s``: amount per second; ``ms``: milliseconds per amount. A ratio above 1 is faster than the first.
    """
    better: Literal["higher", "lower"] = "higher" if unit == "tok/s" else "lower"
    out = []
    for each in timed:
        values = [_value(t, unit) for t in each.turns]
        if not values:
            continue
        spread = (min(values), max(values))
        warm = f"warm-up {_value(each.first, unit):.4g} {unit}, excluded"
        note = "; ".join(filter(None, (warm, each.note)))
        name = f"{cell}:{each.name}"
        out.append(Metric(name, median(values), unit, n=len(values), spread=spread, better=better, note=note))
        if each is not timed[0]:
            ratios = [
                _speed(mine) / _speed(base) for mine, base in zip(each.turns, timed[0].turns, strict=False)
            ]
            out.append(
                Metric(
                    f"{cell}:{each.name}/{timed[0].name}",
                    median(ratios),
                    "×",
                    n=len(ratios),
                    spread=(min(ratios), max(ratios)),
                    of=timed[0].name,
                    better="higher",
                    note="speed ratio within a round",
                )
            )
    return out


def _speed(turn: Turn) -> float:
    return turn.amount / max(turn.seconds, 1e-12)


def _value(turn: Turn, unit: str) -> float:
    return _speed(turn) if unit == "tok/s" else 1e3 / _speed(turn)
