"""The cold tier of a KV cache: which pages go, and how a run of them comes back in front of a prompt.

Pages come back into pages that the sequence was given anyway, and are published like computed ones. All KV
groups must see all keys: behind a window, the pages that a later prompt needs are the first to be lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from workbench.engine.at_rest import Coded, Pages
from workbench.engine.cold import ColdTier
from workbench.engine.prefix import Published
from workbench.engine.store import PageStore
from workbench.models.config import KVGroup
from workbench.spec.errors import PayloadError


class ColdPages:
    """Binds a :class:`ColdTier` to the stores of a KV cache."""

    def __init__(self, tier: ColdTier, stores: Seq[PageStore], groups: Seq[KVGroup]) -> None:
        self.tier = tier
        self._stores, self._groups = stores, groups
        self._thawed: set[Published] = set()

    def give_up(self, entry: Published) -> None:
        """The pool takes the pages of an entry that was just dropped; their content is still there."""
        ancestry = [entry.tokens]
        above = entry.parent
        while above is not None:
            ancestry.append(above.tokens)
            above = above.parent
        ancestry.reverse()
        first = (len(ancestry) - 1) * len(entry.tokens)
        again = entry in self._thawed
        self._thawed.discard(entry)
        pages = Pages(self._stores, self._groups, tuple((p,) for p in entry.pages), first)
        self.tier.keep(entry.namespace, ancestry, pages, again)

    def run(self, namespace: bytes, tokens: Seq[int], known: int, limit: int) -> list[int]:
        """What the tier has behind the first ``known`` pages of a prompt, at most ``limit`` tokens in all."""
        return self.tier.find(namespace, tokens, self._stores[0].geometry.page_size, known, limit)

    def thaw(self, found: Seq[int], tables: Seq[Seq[int]], known: int) -> int:
        """Fill pages ``known`` and following of fresh ``tables``; returns how many of ``found`` came back.

        They are decoded together; the first that is lost or damaged ends it.
        """
        coded: list[Coded] = []
        for number in found:
            page = self.tier.fetch(number)
            if page is None:
                break
            coded.append(page)
        if not coded:
            return 0
        try:
            self._fill(self.tier.codec.join(coded), tables, known, len(coded))
        except PayloadError:  # which one it is shows page by page
            for n, page in enumerate(coded):
                try:
                    self._fill(page, tables, known + n, 1)
                except PayloadError:
                    self.tier.lose(found[n])
                    del coded[n:]
                    break
        self.tier.counts.restored += len(coded)
        return len(coded)

    def _fill(self, coded: Coded, tables: Seq[Seq[int]], at: int, n: int) -> None:
        """Decode ``n`` pages into pages ``at`` and following of the tables."""
        size = self._stores[0].geometry.page_size
        pages = Pages(self._stores, self._groups, tuple(tuple(t[at : at + n]) for t in tables), at * size)
        self.tier.codec.decode(coded, pages)
        pages.settle()

    def note(self, entries: Iterable[Published]) -> None:
        """These entries name pages that came back: giving them up again costs nothing and codes nothing."""
        self._thawed.update(entries)

    def clear(self) -> None:
        """Forget every page."""
        self._thawed.clear()
        self.tier.clear()
