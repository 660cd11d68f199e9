"""The numbers two runs share, side by side, with direction and words.

Metrics, bytes by category and acceptance ratios are compared under one set of names. A ratio is quoted
only between values of one unit and one tag; where the ranges of two repeated measurements overlap, the
words say so. Between runs of different work a ratio is only a ratio: nothing is called faster or better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from workbench.records.form import number
from workbench.spec.events import KV_IN_USE
from workbench.spec.run import Metric, Run

Direction = Literal["better", "worse", "same", "changed"]

ACCEPTANCE = {
    "tau": ("tok/draft", "tokens emitted per verified draft"),
    "rate": ("", "accepted per drafted token"),
    "tokens_per_forward": ("tok", "tokens per sequence and target forward"),
    "alpha": ("", "expected acceptance per drafted token"),
}
# Categories that depend on the size of the pool, not on the technique.
_NEUTRAL = ("kv_free", "kv_cached")
_TIMES = ("s", "ms", "µs", "ns")


@dataclass(frozen=True)
class Delta:
    """One shared number: ``a`` and ``b``, and what changed from a to b in words."""

    name: str
    unit: str
    a: Metric
    b: Metric
    direction: Direction
    overlap: bool
    words: str

    @property
    def ratio(self) -> float | None:
        """b / a, where both are positive."""
        return self.b.value / self.a.value if self.a.value > 0 and self.b.value > 0 else None


def numbers(run: Run) -> Iterator[Metric]:
    """Every number of a run as a metric: metrics, KV bytes in use, bytes by category, acceptance."""
    yield from run.metrics
    if any(name in run.memory for name in KV_IN_USE):
        used = sum(run.memory.get(name, 0) for name in KV_IN_USE)
        yield Metric("memory_kv", used, "B", better="lower", note="of live sequences, empty slots included")
    for name, held in run.memory.items():
        better: Literal["lower", ""] = "" if name in _NEUTRAL else "lower"
        yield Metric(f"memory_{name}", held, "B", better=better)
    for name, (unit, note) in ACCEPTANCE.items():
        value = run.acceptance.get(name)
        if isinstance(value, int | float):
            n = int(run.acceptance.get("steps", 1))
            yield Metric(f"acceptance_{name}", value, unit, n=n, better="higher", note=note)


def deltas(a: Run, b: Run, *, comparable: bool = True) -> tuple[Delta, ...]:
    """Every number both runs have, in the order of ``a``; without judgement where they are not comparable."""
    others = {m.name: m for m in numbers(b)}
    found = [delta(m, others[m.name]) for m in numbers(a) if m.name in others]
    return tuple(found if comparable else map(_unjudged, found))


def delta(a: Metric, b: Metric) -> Delta:
    """Compare one number."""
    better = a.better or b.better
    overlap = _overlap(a, b)
    if a.unit != b.unit or a.tag != b.tag:
        words = f"not comparable ({a.tag} {a.unit} against {b.tag} {b.unit})"
        return Delta(a.name, a.unit, a, b, "changed", overlap, words)
    direction: Direction = "changed"
    if a.value == b.value or (math.isnan(a.value) and math.isnan(b.value)):
        direction = "same"
    elif better and not (math.isnan(a.value) or math.isnan(b.value)):
        direction = "better" if (b.value < a.value) == (better == "lower") else "worse"
    words = _words(a, b)
    if overlap and direction != "same":
        words += " (ranges overlap)"
    return Delta(a.name, a.unit, a, b, direction, overlap, words)


def _unjudged(d: Delta) -> Delta:
    """The same numbers, said of runs that did different work."""
    if d.direction == "same":
        return d
    timed = d.a.unit == d.b.unit and d.a.tag == d.b.tag and d.unit in (*_TIMES, "tok/s")
    words = f"{d.ratio:.3g}×" if timed and d.ratio is not None else d.words
    return replace(d, direction="changed", words=words)


def _overlap(a: Metric, b: Metric) -> bool:
    if a.spread is None or b.spread is None or min(a.n, b.n) < 2:
        return False
    return a.spread[0] <= b.spread[1] and b.spread[0] <= a.spread[1]


def _words(a: Metric, b: Metric) -> str:
    x, y = a.value, b.value
    if x == y:
        return "the same"
    if not (math.isfinite(x) and math.isfinite(y)) or x <= 0 or y <= 0 or a.unit in ("nats", "%"):
        change = y - x
        if a.unit == "B" and math.isfinite(change):
            return ("+" if change > 0 else "") + number(change, "B")
        unit = "points" if a.unit == "%" else a.unit
        return f"{change:+.3g} {unit}".strip() if math.isfinite(change) else "not comparable"
    if a.unit in _TIMES:
        return f"{x / y:.3g}× faster" if y < x else f"{y / x:.3g}× slower"
    if a.unit == "tok/s":
        return f"{y / x:.3g}× faster" if y > x else f"{x / y:.3g}× slower"
    if y > 2 * x:
        return f"{y / x:.3g}× as much"
    return f"{abs(1 - y / x):.1%} {'less' if y < x else 'more'}"
