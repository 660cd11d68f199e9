"""The policy at work: Q while the text is like what it was learnt from, the best fixed choice otherwise.

It learns nothing online. What it expects to be accepted is that of the rounds it was judged by; when recent
rounds are too far from it to be chance, drafting falls back to one exit and one length until they return.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workbench.spec.errors import OptionError
from workbench.speculative.lede.rounds import Policy, Round, rate, static
from workbench.speculative.lede.state import Limits, State, moved


@dataclass(frozen=True)
class Guard:
    """``learnt`` and ``fixed``: share of drafts that held-out rounds of either policy had accepted.

    ``window`` rounds are compared with it; ``sigmas`` standard deviations of a binomial are too far.
    """

    learnt: float
    fixed: float
    window: int = 64
    sigmas: float = 4.0

    def strange(self, accepted: int, drafted: int, *, fixed: bool) -> bool:
        """Whether so few (or many) of the drafts were accepted that the text must be another kind."""
        expected = self.fixed if fixed else self.learnt
        spread = math.sqrt(max(expected * (1 - expected), 1e-4) * drafted)
        return abs(accepted - expected * drafted) > self.sigmas * spread


class Choice:
    """Does what was learnt; where :class:`Guard` finds the text strange, what is fixed. One per sequence."""

    def __init__(self, learnt: Policy, fixed: Policy, guard: Guard) -> None:
        self._learnt, self._fixed, self._guard = learnt, fixed, guard
        self._rounds: list[tuple[int, int]] = []
        self.safe = False  # whether it has fallen back
        self.recent = guard.learnt

    def __call__(self, state: State) -> int:
        """What to do in a state of this sequence."""
        return (self._fixed if self.safe else self._learnt)(state)

    def judged(self, accepted: int, drafted: int) -> None:
        """What came of a round."""
        self.recent = moved(self.recent, accepted, drafted)
        self._rounds.append((accepted, drafted))
        if len(self._rounds) < self._guard.window:
            return
        total = (sum(r[i] for r in self._rounds) for i in (0, 1))
        self.safe = self._guard.strange(*total, fixed=self.safe)
        self._rounds.clear()


def best_static(
    played: Callable[[Policy], Sequence[Round]], limits: Limits, longest: int = 0
) -> tuple[int, int, float]:
    """Exit, length and rate of the best fixed choice, where ``played`` gives the rounds of a policy.

    What a learnt policy must beat. Raises :class:`OptionError` where no layer can be left.
    """
    found = [
        (exit, drafts, rate(list(played(static(exit, drafts)))))
        for exit in range(1, limits.layers)
        for drafts in range(1, (longest or limits.longest) + 1)
    ]
    if not found:
        raise OptionError(f"A model of {limits.layers} layer cannot be left early.")
    return max(found, key=lambda f: f[2])
