"""Hash-chain prefix index: which full pages hold the KV of which tokens after which ancestry.

A page's digest is ``H(parent digest, its tokens)``; the root digest is the namespace, which holds
everything else that shaped the bytes (weights, codec, attention dtype, salt: law 4). A digest only
finds candidates: a hit is confirmed by the tokens and by the identity of the parent, so a weak hash
costs time and never serves another prompt's KV. Only full, committed pages are published; equal
content that was computed twice keeps its first page. (vLLM, automatic prefix caching.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from workbench.engine.pages import NULL_PAGE
from workbench.spec.errors import InvariantError

Digest = Callable[[bytes, tuple[int, ...]], bytes]


def chain_digest(parent: bytes, tokens: tuple[int, ...]) -> bytes:
    """BLAKE2b-128 of the parent's digest and the page's token ids."""
    h = hashlib.blake2b(parent, digest_size=16)
    h.update(b"".join(t.to_bytes(4, "little") for t in tokens))
    return h.digest()


class Published(Protocol):
    """A page that an index can find: one page id per KV group; 0 where a windowed group has lost its own."""

    pages: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Its token ids."""
        ...

    @property
    def parent(self) -> Published | None:
        """The page before it, None at the beginning of a sequence."""
        ...

    @property
    def namespace(self) -> bytes:
        """What else shaped its bytes."""
        ...


E = TypeVar("E", bound=Published)


class Match(NamedTuple):
    """What an index has of a prompt: leading full pages, then the first ``rows`` rows of ``partial``."""

    full: Sequence[Published]
    partial: Published | None = None
    rows: int = 0


class Index(Protocol):
    """Which published pages begin a prompt. ``longest_first``: waiting requests with more of it go first."""

    longest_first: bool

    def match(self, tokens: Sequence[int], namespace: bytes, limit: int) -> Match:
        """The longest known beginning of ``tokens``, at most ``limit`` tokens of it."""
        ...

    def publish(
        self, parent: Any, tokens: tuple[int, ...], namespace: bytes, pages: tuple[int, ...]
    ) -> tuple[Published, bool]:
        """Make a full page findable; returns its entry and whether ``pages`` are the ones it names."""
        ...

    def drop_page(self, group: int, page: int) -> Published | None:
        """Forget the entry that names ``page`` of KV group ``group``."""
        ...

    def lose_page(self, group: int, page: int) -> None:
        """The page of one group is gone; its entry and the pages of other groups stay."""
        ...

    def restore(self, entry: Any, group: int, page: int) -> bool:
        """Give an entry a page of ``group`` again if it has lost its own; whether it had."""
        ...

    def clear(self) -> None:
        """Forget every entry."""
        ...


@dataclass(eq=False, slots=True)
class Entry:
    """One published page: its tokens, its parent (None below the root), its page id per KV group."""

    digest: bytes
    tokens: tuple[int, ...]
    parent: Entry | None
    namespace: bytes
    pages: tuple[int, ...]


class PageNames(Generic[E]):
    """Which published entry names a page: what every index keeps beside its own structure."""

    def __init__(self) -> None:
        self._by_page: dict[tuple[int, int], E] = {}

    def _name(self, entry: E) -> None:
        for group, page in enumerate(entry.pages):
            self._by_page[group, page] = entry

    def _unname(self, entry: E) -> None:
        for group, page in enumerate(entry.pages):
            self._by_page.pop((group, page), None)

    def lose_page(self, group: int, page: int) -> None:
        """The page of one group is gone; its entry and the pages of other groups stay."""
        entry = self._by_page.pop((group, page), None)
        if entry is not None:
            entry.pages = (*entry.pages[:group], NULL_PAGE, *entry.pages[group + 1 :])

    def restore(self, entry: E, group: int, page: int) -> bool:
        """Give an entry a page of ``group`` again if it has lost its own; whether it had.

        An entry that was dropped, though a sequence still holds it, gets none.
        """
        if entry.pages[group] != NULL_PAGE or page == NULL_PAGE or not self._knows(entry):
            return False
        entry.pages = (*entry.pages[:group], page, *entry.pages[group + 1 :])
        self._by_page[group, page] = entry
        return True

    def _knows(self, entry: E) -> bool:
        """Whether the entry can still be found."""
        raise InvariantError(f"{type(self).__name__} does not say which entries it knows.")


class PrefixIndex(PageNames[Entry]):
    """Finds the longest chain of published pages that starts a prompt."""

    longest_first = False

    def __init__(self, page_size: int, digest: Digest = chain_digest) -> None:
        self.page_size = page_size
        self._digest = digest
        super().__init__()
        self._by_digest: dict[bytes, list[Entry]] = {}

    def __len__(self) -> int:
        return sum(len(v) for v in self._by_digest.values())

    def match(self, tokens: Sequence[int], namespace: bytes, limit: int) -> Match:
        """Full pages only: a digest says nothing of a part of a page."""
        return Match(self.lookup(tokens, namespace, limit))

    def lookup(self, tokens: Sequence[int], namespace: bytes, limit: int) -> list[Entry]:
        """Entries of the leading full pages, at most ``limit`` tokens of them; the first gap ends it."""
        out: list[Entry] = []
        parent: Entry | None = None
        for end in range(self.page_size, min(limit, len(tokens)) + 1, self.page_size):
            entry = self._find(parent, tuple(tokens[end - self.page_size : end]), namespace)
            if entry is None:
                break
            out.append(entry)
            parent = entry
        return out

    def publish(
        self, parent: Entry | None, tokens: tuple[int, ...], namespace: bytes, pages: tuple[int, ...]
    ) -> tuple[Entry, bool]:
        """Make a full page findable; returns its entry and whether ``pages`` are the ones it names."""
        known = self._find(parent, tokens, namespace)
        if known is not None:
            return known, known.pages == pages
        digest = self._digest(parent.digest if parent else namespace, tokens)
        entry = Entry(digest, tokens, parent, namespace, pages)
        self._by_digest.setdefault(digest, []).append(entry)
        self._name(entry)
        return entry, True

    def drop_page(self, group: int, page: int) -> Entry | None:
        """Forget the entry that names ``page`` of KV group ``group``; pages keep their references."""
        entry = self._by_page.get((group, page))
        if entry is None:
            return None
        self._unname(entry)
        bucket = self._by_digest[entry.digest]
        bucket.remove(entry)
        if not bucket:
            del self._by_digest[entry.digest]
        return entry

    def clear(self) -> None:
        """Forget every entry; pages keep their references."""
        self._by_digest.clear()
        self._by_page.clear()

    def _knows(self, entry: Entry) -> bool:
        return any(e is entry for e in self._by_digest.get(entry.digest, ()))

    def _find(self, parent: Entry | None, tokens: tuple[int, ...], namespace: bytes) -> Entry | None:
        digest = self._digest(parent.digest if parent else namespace, tokens)
        for entry in self._by_digest.get(digest, ()):
            if entry.tokens == tokens and _same_chain(entry, parent, namespace):
                return entry
        return None


def _same_chain(entry: Entry, parent: Entry | None, namespace: bytes) -> bool:
    """True when ``entry`` continues ``parent``: the same object, or the same tokens all the way up."""
    if entry.namespace != namespace:
        return False
    mine = entry.parent
    while mine is not parent:
        if mine is None or parent is None or mine.tokens != parent.tokens:
            return False
        mine, parent = mine.parent, parent.parent
    return True
