"""What is sent next: a level of the chunk, or its text, decided from past transfers only.

Section 5.3 of the paper: the throughput of the chunk before is taken to last; for every choice the delay of
*all* remaining chunks under it is predicted; the least lossy choice that meets the objective is taken for the
next chunk, and the next chunk is decided anew. Text is lossless but must be computed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from workbench.spec.errors import OptionError

TEXT = -1
"""The choice of sending a chunk's tokens instead of its KV."""


@dataclass(frozen=True)
class Offer:
    """One chunk as it is stored: bytes per level, from the least to the most lossy, and what each costs here.

    ``decode`` and ``compute`` are seconds: to decode a level, and to compute the KV from ``text`` bytes.
    """

    sizes: tuple[int, ...]
    decode: tuple[float, ...]
    text: int
    compute: float

    def __post_init__(self) -> None:
        if not self.sizes or len(self.sizes) != len(self.decode):
            raise OptionError("A chunk needs at least one level, each with bytes and seconds of decoding.")
        if min(*self.sizes, self.text, *self.decode, self.compute) < 0:
            raise OptionError("Bytes and seconds of a chunk cannot be negative.")

    def cost(self, choice: int) -> tuple[int, float]:
        """Bytes to send and seconds of work here. Raises :class:`OptionError` for a level it lacks."""
        if choice == TEXT:
            return self.text, self.compute
        if not 0 <= choice < len(self.sizes):
            raise OptionError(
                f"The chunk has no level {choice}.", hint=f"Levels are 0 to {len(self.sizes) - 1}."
            )
        return self.sizes[choice], self.decode[choice]


@dataclass(frozen=True)
class Situation:
    """What is known before a chunk is sent: ``bandwidth`` is the last chunk's, in bytes per second.

    ``now``: when sending can begin; ``busy``: when decoding and computing of all before is done; both in
    seconds since the request. ``bandwidth`` is None before the first chunk.
    """

    remaining: tuple[Offer, ...]
    now: float
    busy: float
    bandwidth: float | None
    slo: float

    def expected(self, choice: int, chunks: int | None = None) -> float:
        """When the next ``chunks`` (all) would be ready, each sent as ``choice``, the bandwidth lasting."""
        arrived, ready = self.now, self.busy
        for offer in self.remaining[:chunks]:
            nbytes, seconds = offer.cost(choice)
            arrived += nbytes / self.bandwidth if self.bandwidth else 0.0
            ready = max(ready, arrived) + seconds
        return ready


class Policy(Protocol):
    """Decides chunk by chunk."""

    def choose(self, situation: Situation) -> int:
        """A level, 0 being the least lossy, or :data:`TEXT`."""


@dataclass(frozen=True)
class Fixed:
    """Always the same choice."""

    choice: int

    def choose(self, situation: Situation) -> int:
        """The same as ever."""
        return self.choice


@dataclass(frozen=True)
class Adaptive:
    """The paper's rule; ``start`` is the level of the first chunk, when no bandwidth is known.

    ``text`` says where text stands: ``fallback`` after all levels, ``first`` before them, as it loses
    nothing (the paper's order; it spends computing to save quality), or ``never``. When nothing meets the
    objective, whatever is expected to be ready first is sent.

    The paper's rule fills the time it has, so a later drop of bandwidth finds no slack. ``reserve`` is the
    share of the time left that is not planned for: 0 is the paper's rule.
    """

    start: int = 1
    text: Literal["fallback", "first", "never"] = "fallback"
    reserve: float = 0.0

    def __post_init__(self) -> None:
        if self.text not in ("fallback", "first", "never") or not 0 <= self.reserve < 1 or self.start < 0:
            raise OptionError(
                f"A transfer cannot adapt with start = {self.start}, text = {self.text!r}, "
                f"reserve = {self.reserve}.",
                hint="start is a level, text one of fallback, first, never, reserve from 0 to below 1.",
            )

    def choose(self, situation: Situation) -> int:
        """The least lossy choice that is expected to meet the objective."""
        levels = list(range(len(situation.remaining[0].sizes)))
        if situation.bandwidth is None:
            return min(self.start, levels[-1])
        order = {"fallback": [*levels, TEXT], "first": [TEXT, *levels], "never": levels}[self.text]
        expected = {choice: situation.expected(choice) for choice in order}
        deadline = situation.slo - self.reserve * max(situation.slo - situation.now, 0.0)
        meets = [choice for choice in order if expected[choice] <= deadline]
        return meets[0] if meets else min(order, key=lambda choice: situation.expected(choice, 1))
