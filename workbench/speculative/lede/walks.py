"""Walks over a text whose every place was drafted for at all exits: any policy's rounds, without the model.

A round gains its accepted tokens and one of the model's own; the next begins behind them. At temperature 0
that is what an engine would do; above it the text of a walk is the logged one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from workbench.speculative.lede.rounds import Costs, Policy, Round, World, play, static
from workbench.speculative.lede.state import Limits, Reading, moved


@dataclass(frozen=True)
class Chain:
    """A chain drafted behind one exit: the law that each draft was taken from, and how many are accepted."""

    readings: tuple[Reading, ...]
    accepted: int


@dataclass(frozen=True)
class Place:
    """A place in a text with a chain behind every exit, each as long as any policy drafts."""

    chains: Mapping[int, Chain]

    def reading(self, draft: int, layer: int) -> Reading:
        """As :class:`World`."""
        return self.chains[layer].readings[draft]

    def accepted(self, exit: int, drafted: int) -> int:
        """As :class:`World`: of a longer chain those that would have been drafted."""
        return min(drafted, self.chains[exit].accepted)


def walk(
    text: Sequence[World], policy: Policy, limits: Limits, costs: Costs, recent: float, start: int = 0
) -> list[Round]:
    """The rounds of a policy over the places of a text, from ``start`` on; ``recent`` at the first."""
    out: list[Round] = []
    at = start
    while at < len(text):
        out.append(play(text[at], policy, limits, costs, recent))
        recent = moved(recent, out[-1].accepted, out[-1].drafted)
        at += out[-1].tokens
    return out


def explored(
    texts: Sequence[Sequence[World]], limits: Limits, costs: Costs, recent: float, times: int, seed: int
) -> Iterator[Round]:
    """Rounds of chance: every one with an exit and a length of its own, or none; ``times`` walks per text."""
    toss = random.Random(seed)
    for _ in range(times):
        for text in texts:
            at, now = toss.randrange(min(len(text), limits.longest)) if text else 0, recent
            while at < len(text):
                exit = toss.choice((0, *limits.exits))
                policy = static(exit, toss.randint(1, limits.longest))
                played = play(text[at], policy, limits, costs, now)
                now = moved(now, played.accepted, played.drafted)
                at += played.tokens
                yield played
