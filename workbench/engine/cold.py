"""Cold pages: what a pool has to give up goes through a codec into a bounded tier, and comes back on a hit.

Pages are found by what they are: namespace and all tokens up to their end, spelled by a tree whose edges are
whole pages of tokens, so another prefix's page is never served, whatever hashes say. The tier is inclusive:
a page that came back stays in it, so giving that page up again costs nothing and loses nothing twice. The
least recently used pages leave first. A store that fails ends the tier, not the run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

from workbench.engine.at_rest import Coded, ColdCodec, Pages
from workbench.spec.errors import PayloadError, StorageError, WorkbenchError


class ColdStore(Protocol):
    """Where coded pages lie, by number.

    ``memory``: bytes of memory held for them. Raises :class:`StorageError` when it cannot be written or read,
    :class:`PayloadError` for what is damaged.
    """

    memory: int

    def put(self, number: int, coded: Coded) -> int:
        """Keep a page; returns the bytes it takes."""
        ...

    def get(self, number: int) -> Coded:
        """A page that was put."""
        ...

    def drop(self, number: int) -> None:
        """Forget a page."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


@dataclass(eq=False, slots=True)
class Node:
    """A page of tokens behind ``parent``; ``number`` and ``nbytes`` while the tier has its bytes."""

    tokens: tuple[int, ...]
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    number: int | None = None
    nbytes: int = 0


@dataclass
class Counts:
    """Pages ``stored``, ``restored``, ``skipped`` (not coded a second time), ``dropped`` (least recently
    used) and ``missed`` (damaged, or lost between looking and reading)."""

    stored: int = 0
    restored: int = 0
    skipped: int = 0
    dropped: int = 0
    missed: int = 0

    def as_dict(self) -> dict[str, int]:
        """JSON form."""
        return asdict(self)


class ColdTier:
    """Holds at most ``limit`` bytes of coded pages."""

    def __init__(self, codec: ColdCodec, store: ColdStore, limit: int) -> None:
        self.codec = codec
        self.store = store
        self.limit = limit
        self.held = 0
        self.counts = Counts()
        self.warning: str | None = None
        self._told = False
        self._roots: dict[bytes, Node] = {}
        self._used: OrderedDict[int, tuple[bytes, Node]] = OrderedDict()
        self._numbers = 0

    @property
    def alive(self) -> bool:
        """False once its store has failed or it was closed."""
        return self.warning is None

    def __len__(self) -> int:
        return len(self._used)

    def keep(self, namespace: bytes, ancestry: Sequence[tuple[int, ...]], pages: Pages, again: bool) -> None:
        """A page is given up: ``ancestry`` are the tokens of its chain, its own last.

        ``again``: it was restored from here and its bytes are gone: coding it now would lose twice.
        """
        if not self.alive:
            return
        known = self._find(namespace, ancestry)
        if known is not None and known.number is not None:
            self._used.move_to_end(known.number)
            return
        if again:
            self.counts.skipped += 1
            return
        try:
            coded = self.codec.encode(pages)
            self._numbers += 1
            nbytes = self.store.put(self._numbers, coded)
        except StorageError as error:
            self._fail(error)
            return
        except WorkbenchError:  # rows that the codec cannot hold: the page is lost as it would be without it
            self.counts.skipped += 1
            return
        node = self._grow(namespace, ancestry)
        node.number, node.nbytes = self._numbers, nbytes
        self._used[node.number] = (namespace, node)
        self.held += nbytes
        self.counts.stored += 1
        while self.held > self.limit and self._used:
            self._drop(next(iter(self._used)))
            self.counts.dropped += 1

    def find(
        self, namespace: bytes, tokens: Sequence[int], page_size: int, known: int, limit: int
    ) -> list[int]:
        """Numbers of the pages that follow the first ``known`` ones of ``tokens``, up to the first gap.

        At most ``limit`` tokens are covered in all.
        """
        node, found = self._roots.get(namespace), list[int]()
        for end in range(page_size, min(limit, len(tokens)) + 1, page_size):
            node = node.children.get(tuple(tokens[end - page_size : end])) if node is not None else None
            if node is None:
                break
            if end <= known * page_size:
                continue
            if node.number is None:
                break
            found.append(node.number)
        return found

    def fetch(self, number: int) -> Coded | None:
        """The bytes of a page that was found; None when they are gone or damaged."""
        entry = self._used.get(number)
        if entry is None or not self.alive:
            self.counts.missed += 1
            return None
        try:
            coded = self.store.get(number)
        except PayloadError:
            self.lose(number)
            return None
        except StorageError as error:
            self._fail(error)
            return None
        self._used.move_to_end(number)
        return coded

    def lose(self, number: int) -> None:
        """A page turned out to be damaged."""
        self.counts.missed += 1
        if number in self._used:
            self._drop(number)

    def report(self) -> dict[str, int]:
        """The counts so far, and what is held: ``pages`` and ``bytes``, in memory or on disk."""
        return {**self.counts.as_dict(), "pages": len(self._used), "bytes": self.held}

    def warnings(self) -> tuple[str, ...]:
        """What has gone wrong since this was last asked."""
        if self.warning is None or self._told:
            return ()
        self._told = True
        return (self.warning,)

    def nbytes(self) -> dict[str, int]:
        """``kv_cold``: bytes of memory that coded pages take."""
        return {"kv_cold": self.store.memory}

    def clear(self) -> None:
        """Forget every page."""
        while self._used:
            self._drop(next(iter(self._used)))

    def close(self) -> None:
        """Forget every page and remove what lies on disk; closing twice is fine."""
        self._forget()
        self.warning = self.warning or "The cold tier was closed."
        self.store.close()

    # -- inside ---------------------------------------------------------------------------------------

    def _find(self, namespace: bytes, ancestry: Sequence[tuple[int, ...]]) -> Node | None:
        node = self._roots.get(namespace)
        for tokens in ancestry:
            node = node.children.get(tokens) if node is not None else None
        return node

    def _grow(self, namespace: bytes, ancestry: Sequence[tuple[int, ...]]) -> Node:
        node = self._roots.setdefault(namespace, Node((), None))
        for tokens in ancestry:
            child = node.children.get(tokens)
            if child is None:
                child = node.children[tokens] = Node(tokens, node)
            node = child
        return node

    def _drop(self, number: int) -> None:
        namespace, node = self._used.pop(number)
        self.held -= node.nbytes
        node.number, node.nbytes = None, 0
        while node.parent is not None and node.number is None and not node.children:
            del node.parent.children[node.tokens]
            node = node.parent
        if node.parent is None and not node.children:
            del self._roots[namespace]
        try:
            self.store.drop(number)
        except StorageError as error:
            self._fail(error)

    def _fail(self, error: WorkbenchError) -> None:
        self.warning = f"The cold tier is off: {error.message}"
        self._forget()
        self.store.close()

    def _forget(self) -> None:
        self._roots.clear()
        self._used.clear()
        self.held = 0
