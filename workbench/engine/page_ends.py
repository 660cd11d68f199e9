"""What a drafter reads at the row behind a published page: the target's state of the page's last token.

A drafter's row s is given the state of position s - 1. Behind a prefix that an index gave, the target does
not compute that position again; so its state is kept with the page, as long as the page can be found.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from workbench.engine.prefix import Published


class PageEnds:
    """States [H] by published page.

    ``rereads``: the last tokens of the head of a page that the target computes again, because within pages
    nothing is kept; None: a head is of no use.
    """

    def __init__(self) -> None:
        self.rereads: int | None = 0
        self._held: dict[Published, Tensor] = {}

    def again(self, rows: int) -> int:
        """Of the first ``rows`` rows of a page those that are computed again: all, if they are of no use."""
        return rows if self.rereads is None else min(rows, self.rereads)

    def keep(self, page: Published, state: Tensor | None) -> None:
        """What is read behind ``page``, if it is known; what was kept before stays."""
        if state is not None:
            self._held.setdefault(page, state)

    def behind(self, pages: Sequence[Published]) -> dict[int, Tensor]:
        """What is read behind the last of a sequence's pages, by its number; empty where nobody knows."""
        state = self._held.get(pages[-1]) if pages else None
        return {} if state is None else {len(pages) - 1: state}

    def of(self, pages: Sequence[Published]) -> dict[int, Tensor]:
        """What is read behind each of a sequence's pages, where it is known."""
        return {i: self._held[page] for i, page in enumerate(pages) if page in self._held}

    def lose(self, page: Published) -> None:
        """The page can be found no more."""
        self._held.pop(page, None)

    def clear(self) -> None:
        """No page can be found any more."""
        self._held.clear()

    def nbytes(self) -> int:
        """Bytes of the states, all of one size."""
        return len(self._held) * next((s.nbytes for s in self._held.values()), 0)
