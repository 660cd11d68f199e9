"""Stop strings over streamed text.

Text is emitted only when it can no longer be part of a stop string, so what a reader has seen is never
taken back. Results do not depend on how the text was cut into pieces, nor on whether tokens came one
by one or as one accepted draft.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple


class Fed(NamedTuple):
    """``text`` may be shown now; ``matched``: a stop string is complete and nothing more will come."""

    text: str
    matched: bool


class StopMatcher:
    """Watches one output for stop strings.

    The stop that *ends* first wins; of several ending at one character, the longest. Text up to its start
    is delivered (up to its end with ``include``). Feed one piece per token: the token whose piece
    returns ``matched`` is the last one of the request. ``matched`` holds the stop string that was found.
    """

    def __init__(self, stops: Sequence[str] = (), include: bool = False) -> None:
        self.stops = tuple(stops)
        self.include = include
        self.matched: str | None = None
        self._held = ""
        self._longest = max(map(len, self.stops), default=0)

    @property
    def held(self) -> str:
        """Text not yet shown: the longest suffix so far that may still become a stop string."""
        return self._held

    def feed(self, text: str) -> Fed:
        """Take the next piece of text; after a match everything is swallowed."""
        if self.matched is not None:
            return Fed("", True)
        buffer = self._held + text
        found = [(at + len(s), at, s) for s in self.stops if (at := buffer.find(s)) >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return Fed(buffer[: end if self.include else start], True)
        keep = self._may_grow(buffer)
        self._held = buffer[len(buffer) - keep :]
        return Fed(buffer[: len(buffer) - keep], False)

    def flush(self) -> str:
        """The output ended without a match: what was held back is ordinary text after all."""
        text, self._held = self._held, ""
        return text

    def copy(self) -> StopMatcher:
        """An independent matcher in the same state, for a fork of the sequence."""
        return copy.copy(self)  # all state is immutable values

    def _may_grow(self, buffer: str) -> int:
        for n in range(min(self._longest - 1, len(buffer)), 0, -1):
            tail = buffer[-n:]
            if any(s.startswith(tail) for s in self.stops):
                return n
        return 0
