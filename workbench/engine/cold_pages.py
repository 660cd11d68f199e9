"""The cold tier of a KV cache: which pages go, and how a run of them comes back in front of a prompt.

Pages come back into pages that the sequence was given anyway, and are published like computed ones. All KV
groups must see all keys: behind a window, the pages that a later prompt needs are the first to be lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from workbench.engine.at_rest import Pages
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

        The first that is lost or damaged ends it.
        """
        size = self._stores[0].geometry.page_size
        for n, number in enumerate(found):
            coded = self.tier.fetch(number)
            if coded is None:
                return n
            at = known + n
            pages = Pages(self._stores, self._groups, tuple((t[at],) for t in tables), at * size)
            try:
                self.tier.codec.decode(coded, pages)
            except PayloadError:
                self.tier.lose(number)
                return n
            pages.settle()
            self.tier.counts.restored += 1
        return len(found)

    def note(self, entries: Iterable[Published]) -> None:
        """These entries name pages that came back: giving them up again costs nothing and codes nothing."""
        self._thawed.update(entries)

    def clear(self) -> None:
        """Forget every page."""
        self._thawed.clear()
        self.tier.clear()
