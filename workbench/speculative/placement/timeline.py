"""Rounds with two rendezvous on a virtual clock: when each half of a Mirror round starts and ends.

Mirror Speculative Decoding (arXiv 2510.13161): the target runs its first layers, sends candidates, and goes
on; the drafter makes all branches meanwhile; the verdict goes to the drafter, and the window that was found
(or drafted afresh) comes back. Without a miss a round takes

    T[1..l] + t_msg + max(T[l+1..N], T_draft) + t_msg

and a miss adds what the branches still took when the verdict came, and the draft that is made anew. Times are
entered or measured, the rounds are real: figures from here are *simulated*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.spec.errors import OptionError


@dataclass(frozen=True)
class MirrorTimes:
    """Seconds: ``early`` T[1..l], ``late`` T[l+1..N], ``branches`` and ``fresh`` drafts, ``link`` t_msg.

    ``stops``: the drafter gives up its branches when the verdict shows that none fits; else it ends them.
    """

    early: float
    late: float
    branches: float
    fresh: float
    link: float = 0.0
    stops: bool = True

    def __post_init__(self) -> None:
        if not all(t >= 0 for t in (self.early, self.late, self.branches, self.fresh, self.link)):
            raise OptionError("A time below 0 was entered.", hint="Enter 0 or more seconds.")

    @property
    def verify(self) -> float:
        """T[1..N]."""
        return self.early + self.late


@dataclass(frozen=True)
class MirrorRound:
    """One round on the clock: target at work from ``start`` to ``verdict``, the next window at ``end``.

    ``idle_target`` is what the target waits behind its verdict, the two messages included.
    """

    start: float
    verdict: float
    branches: tuple[float, float]
    fresh: tuple[float, float] | None
    end: float
    hit: bool
    emitted: int

    @property
    def idle_target(self) -> float:
        """Seconds from the verdict to the next window."""
        return self.end - self.verdict


def mirror_timeline(rounds: Sequence[tuple[bool, int]], times: MirrorTimes) -> list[MirrorRound]:
    """Place rounds (whether the branch was there, tokens emitted) one behind the other."""
    out: list[MirrorRound] = []
    now = 0.0
    for hit, emitted in rounds:
        began = now + times.early + times.link
        verdict = now + times.verify
        told = verdict + times.link
        done = began + times.branches
        fresh: tuple[float, float] | None = None
        if hit:
            ready = max(told, done)
        else:
            if times.stops and told < done:
                done = max(told, began)
            fresh = (max(told, done), max(told, done) + times.fresh)
            ready = fresh[1]
        end = ready + times.link
        out.append(MirrorRound(now, verdict, (began, done), fresh, end, hit, emitted))
        now = end
    return out
