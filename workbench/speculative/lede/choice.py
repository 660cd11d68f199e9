"""Learnt or fixed: Q while drafts fare as they did where it was learnt, the best fixed choice otherwise.

Nothing is learnt online. When recent rounds fare worse than chance explains, the text is of another kind, and
drafting falls back to one exit and one length, or to none, until they fare as they should again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from workbench.speculative.lede.rounds import Policy, Round, rate, static
from workbench.speculative.lede.state import Limits

_NARROW = 0.05  # no text is as even as to vary less from round to round


@dataclass(frozen=True)
class Guard:
    """``learnt``, ``fixed``: mean and deviation of the share of a held-out round's drafts that was accepted.

    ``window`` rounds are compared with them; ``sigmas`` standard errors below are too far to be chance.
    """

    learnt: tuple[float, float]
    fixed: tuple[float, float]
    window: int = 48
    sigmas: float = 4.0

    def strange(self, shares: Sequence[float], *, fixed: bool) -> bool:
        """Whether so few of the drafts were accepted that the text must be of another kind."""
        mean, deviation = self.fixed if fixed else self.learnt
        return fmean(shares) < mean - self.sigmas * max(deviation, _NARROW) / math.sqrt(len(shares))


def fared(rounds: Sequence[Round]) -> tuple[float, float]:
    """Mean and deviation of the share of drafts accepted, over the rounds that drafted; zeros without any."""
    shares = [r.accepted / r.drafted for r in rounds if r.drafted]
    return (fmean(shares), pstdev(shares)) if shares else (0.0, 0.0)


class Watch:
    """Counts how rounds fare; ``safe``: it has fallen back to what is fixed."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._shares: list[float] = []
        self.safe = False

    def judged(self, accepted: int, drafted: int) -> None:
        """What came of a round that drafted."""
        self._shares.append(accepted / drafted)
        if len(self._shares) >= self._guard.window:
            self.safe = self._guard.strange(self._shares, fixed=self.safe)
            self._shares.clear()


def best_static(
    played: Callable[[Policy, Limits], Sequence[Round]], limits: Limits
) -> tuple[int, int, float]:
    """Exit, length and rate of the best fixed choice, where ``played`` gives the rounds of a policy.

    What a learnt policy must beat: it looks at no layer but its own. (0, 0, 1.0) where none beats no drafts.
    """
    found = [(0, 0, 1.0)]
    for exit in limits.exits:
        alone = Limits(limits.layers, limits.longest, (exit,))
        for drafts in range(1, limits.longest + 1):
            found.append((exit, drafts, rate(list(played(static(exit, drafts), alone)))))
    return max(found, key=lambda f: f[2])
