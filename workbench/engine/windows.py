"""What attention windows do to page tables: pages behind a window go back, and cached ones may be lost.

Layers of one window lie in KV groups with page tables of their own. A token at position ``p`` sees the keys
from ``p - window + 1`` on, so pages that end before that are of no more use to its sequence; and a cached
prefix can be used as long as the pages that its end still sees are there (as in vLLM's hybrid
KV cache manager).
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.engine.pages import NULL_PAGE
from workbench.engine.prefix import Match


class Windows:
    """Windows of ``groups`` KV groups; None, or none given: all keys are seen."""

    def __init__(self, windows: Sequence[int | None], groups: int, page_size: int) -> None:
        self._windows = list(windows) or [None] * groups
        self._page_size = page_size

    def behind(self, group: int, computed: int) -> int:
        """Leading pages of a table that no token from position ``computed`` on sees."""
        window = self._windows[group]
        return 0 if window is None else max(0, computed - window + 1) // self._page_size

    def reach(self, group: int, slots: int, computed: int, block: int | None) -> int:
        """Slots a table must have for a prompt of ``slots``, of which ``computed`` are there, when blocks of
        at most ``block`` tokens follow (None: it is computed at once).

        In front of a window it is enough that pages for the first blocks are there: by the time they are
        full, as many behind the window have come back.
        """
        window = self._windows[group]
        if window is None or block is None:
            return slots
        return min(slots, max(computed, window) + block + self._page_size)

    def may_lose(self, group: int) -> bool:
        """Whether a prefix can be of use without a page of this group: other groups see all keys."""
        return self._windows[group] is not None and None in self._windows

    def whole(self, match: Match) -> Match:
        """The longest part of a match of which no page that its end sees is lost."""

        def there(n: int, rows: int) -> bool:
            return all(
                entry.pages[group] != NULL_PAGE
                for group in range(len(self._windows))
                for entry in match.full[self.behind(group, n * self._page_size + rows) : n]
            )

        n = len(match.full)
        if match.partial is not None and NULL_PAGE not in match.partial.pages and there(n, match.rows):
            return match
        while n and not there(n, 0):
            n -= 1
        return Match(match.full[:n])
