"""A simulated network link: how fast bytes arrive, and when a transfer ends."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from workbench.spec.errors import OptionError


@dataclass(frozen=True)
class BandwidthTrace:
    """``rates[i]`` bytes per second from ``starts[i]`` seconds on; the last holds for ever.

    Raises :class:`OptionError` unless ``starts`` begin at 0 and grow, rates are finite and not negative, and
    the last is positive.
    """

    starts: tuple[float, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = zip(self.starts, self.starts[1:], strict=False)
        good = (
            len(self.starts) == len(self.rates) > 0
            and self.starts[0] == 0
            and all(a < b < math.inf for a, b in pairs)
            and all(0 <= r < math.inf for r in self.rates)
            and self.rates[-1] > 0
        )
        if not good:
            raise OptionError(
                "A bandwidth trace needs growing starts from 0 and as many rates, the last above 0.",
                hint="For example starts (0, 2), rates (1e8, 1e7): a drop to a tenth after two seconds.",
            )

    @classmethod
    def steady(cls, rate: float) -> BandwidthTrace:
        """The same bandwidth for ever, in bytes per second."""
        return cls((0.0,), (rate,))

    @classmethod
    def drop(cls, rate: float, factor: float, begin: float, seconds: float) -> BandwidthTrace:
        """``rate``, but a ``factor``-th of it for ``seconds`` from ``begin`` on."""
        if begin <= 0:
            return cls((0.0, seconds), (rate / factor, rate))
        return cls((0.0, begin, begin + seconds), (rate, rate / factor, rate))

    def finish(self, begin: float, nbytes: float) -> float:
        """When ``nbytes`` sent from ``begin`` on have arrived, in seconds."""
        now, left = begin, nbytes
        for i, rate in enumerate(self.rates):
            end = self.starts[i + 1] if i + 1 < len(self.starts) else math.inf
            if end <= now:
                continue
            if left <= rate * (end - now):
                return now + (left / rate if left else 0.0)
            left -= rate * (end - now)
            now = end
        return now


def random_drops(
    rate: float,
    *,
    factor: float = 10.0,
    begin: tuple[float, float],
    seconds: tuple[float, float],
    n: int,
    seed: int = 0,
) -> list[BandwidthTrace]:
    """``n`` links of ``rate`` bytes per second that fall to a ``factor``-th, each at a moment of its own.

    The moment and the length of a drop are uniform in the ranges given, in seconds.
    """
    draw = random.Random(seed)
    return [BandwidthTrace.drop(rate, factor, draw.uniform(*begin), draw.uniform(*seconds)) for _ in range(n)]
