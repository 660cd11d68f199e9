"""What a step costs as a function of its rows, and a draft as a function of its length: measured as it runs.

Nothing is assumed of machine or model. A step's milliseconds, drafting excluded, fall into bins of rows; the
curve goes through the median of each bin, never falls (more rows are never cheaper; where samples say so they
are pooled), and is interpolated between bins. Contexts grow and shrink and machines get busy: what was not
seen for long counts less and is taken to be cheaper than it was, so that it is tried again some day.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

_WINDOW = 15  # samples per bin
_TRUST = 3  # samples of a bin before it is believed: one may be a warm-up
_OLD = 32  # steps after which a bin's samples make room
_HOPE = 0.999  # a bin that was not seen is taken to be cheaper by this, every step
_FADE = 0.97  # and its weight, where it is pooled, falls by this

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """Milliseconds by rows through points of rising rows, [n] each."""

    rows: Floats
    ms: Floats

    @classmethod
    def of(cls, samples: Iterable[tuple[float, float]]) -> Curve:
        """Through the medians of (rows, milliseconds) by bin, pooled: more rows never cost less."""
        bins: dict[int, list[tuple[float, float]]] = {}
        for rows, ms in samples:
            bins.setdefault(_bin(int(rows)), []).append((rows, ms))
        found = [bins[at] for at in sorted(bins)]
        heights = rising([(median([ms for _, ms in b]), float(len(b))) for b in found])
        return cls(np.array([fmean([rows for rows, _ in b]) for b in found]), np.array(heights))

    def __call__(self, rows: NDArray[np.int64] | Floats | float) -> Floats:
        """Milliseconds of steps of ``rows``; flat below what was seen, on the last slope beyond."""
        x, y = self.rows, self.ms
        out = np.interp(rows, x, y)
        if len(x) > 1:
            slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
            out = out + slope * np.clip(np.asarray(rows) - x[-1], 0, None)
        return np.asarray(out)


class StepCost:
    """Milliseconds of a step without drafting, by rows."""

    def __init__(self) -> None:
        self._bins: dict[int, deque[tuple[int, float]]] = {}
        self._last: dict[int, int] = {}  # step of each bin's newest sample
        self._steps = 0
        self._curve = Curve(np.empty(0), np.empty(0))

    def add(self, rows: int, ms: float) -> None:
        """A step of ``rows`` tokens took ``ms``."""
        if rows < 1 or ms <= 0:
            return
        self._steps += 1
        at = _bin(rows)
        samples = self._bins.setdefault(at, deque(maxlen=_WINDOW))
        while len(samples) >= _TRUST and self._steps - self._last[at] > _OLD:
            samples.popleft()  # so that two new ones outvote what is left of the old
        samples.append((rows, ms))
        self._last[at] = self._steps
        self._fit()

    def __call__(self, rows: NDArray[np.int64] | Floats) -> Floats:
        """Milliseconds [n] of steps of ``rows``; flat below what was seen, on the last slope beyond.

        Only once a step was seen (:attr:`known`).
        """
        return self._curve(rows)

    @property
    def known(self) -> bool:
        """Whether any step was seen."""
        return len(self._curve.rows) > 0

    def age(self, rows: int) -> int:
        """Steps since the bin of ``rows`` was last seen; very many when it is not trusted yet."""
        at = _bin(rows)
        return self._steps - self._last[at] if len(self._bins.get(at, ())) >= _TRUST else 1 << 30

    def points(self) -> list[tuple[float, float]]:
        """(rows, milliseconds) the curve goes through."""
        return list(zip(self._curve.rows.tolist(), self._curve.ms.tolist(), strict=True))

    def nbytes(self) -> int:
        """Bytes of the curve's arrays and, at 16 a sample, of its bins."""
        return self._curve.rows.nbytes + self._curve.ms.nbytes + 16 * sum(map(len, self._bins.values()))

    def _fit(self) -> None:
        points = []
        sure = [b for b, samples in self._bins.items() if len(samples) >= _TRUST]
        for at in sorted(sure or self._bins):
            samples, age = self._bins[at], self._steps - self._last[at]
            ms = median([m for _, m in samples]) * _HOPE**age
            points.append((fmean([r for r, _ in samples]), ms, len(samples) * _FADE**age))
        heights = rising([(ms, weight) for _, ms, weight in points])
        self._curve = Curve(np.array([r for r, _, _ in points]), np.array(heights))


class DraftCost:
    """Milliseconds of drafting by the longest draft asked for: a line, by least squares over recent steps."""

    def __init__(self, memory: float = 50.0) -> None:
        self._keep = 1 - 1 / memory
        self._sums = np.zeros(5)  # 1, x, y, xx, xy

    def add(self, length: int, ms: float) -> None:
        """Asking for ``length`` tokens took ``ms``."""
        self._sums = self._sums * self._keep + np.array([1, length, ms, length * length, length * ms])

    def __call__(self, length: NDArray[np.int64]) -> Floats:
        """Milliseconds of drafts of ``length`` [n]; 0 for length 0, and before anything was seen.

        As long as only one length was asked for, half of it is taken to cost half, and so will be tried.
        """
        n, x, y, xx, xy = self._sums
        if not n:
            return np.zeros(len(length))
        spread = n * xx - x * x
        slope = max(0.0, (n * xy - x * y) / spread) if spread > 1e-3 * n * n else y / x
        start = max(0.0, (y - slope * x) / n)
        return np.where(length > 0, start + slope * length, 0.0)


def _bin(rows: int) -> int:
    """1 to 8 alone, then four bins to every doubling."""
    if rows <= 8:
        return rows
    octave = rows.bit_length()
    return 4 * octave + (rows >> (octave - 3)) % 4


def rising(values: list[tuple[float, float]]) -> list[float]:
    """The nearest non-decreasing values in the weighted least-squares sense: pool adjacent violators."""
    pools: list[list[float]] = []  # value, weight, members
    for value, weight in values:
        pools.append([value, weight, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            v, w, n = pools.pop()
            u, z, m = pools[-1]
            pools[-1] = [(u * z + v * w) / (z + w), z + w, m + n]
    return [v for v, _, n in pools for _ in range(int(n))]
