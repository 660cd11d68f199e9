"""A drafter that sits elsewhere, as the engine's ``drafter`` seam: it takes what has come, and waits little.

The engine verifies what is proposed as ever, so where the drafter sits, how late its messages are and
whether it still lives decide about speed alone. Drafts carry no law: above temperature 0 they are judged by
sample and match (R3, R4), with which a seeded run equals the plain one id by id; p/q ratios would be wrong
for trees that are pruned after their values were seen.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.speculative.placement.messages import Close, Message, TailStream
from workbench.speculative.placement.tails import TailBook

KEPT = 1 << 12
"""Outcomes that are kept until somebody asks."""


class Told(NamedTuple):
    """Of a verdict: whether what came next was there. ``age``: verdicts that the tree had outlived before it
    since it last started anew; None where none lives on."""

    hit: bool
    age: int | None = None


class Link(Protocol):
    """The way to the drafter, as the target sees it; neither method ever raises."""

    @property
    def alive(self) -> bool:
        """Whether anybody listens."""
        ...

    @property
    def broken(self) -> str:
        """Why nobody does, where it is known."""
        ...

    def clock(self) -> float:
        """Seconds of the clock that :meth:`poll` waits by."""
        ...

    def nbytes(self) -> int:
        """Bytes that the drafter's side holds, as far as it said."""
        ...

    def send(self, message: Message) -> None:
        """Say something; lost when nobody listens."""
        ...

    def poll(self, wait: float = 0.0) -> list[Message]:
        """What has come; waits up to ``wait`` seconds of the link's clock for the first."""
        ...


class RemoteDrafter:
    """``budget`` nodes are verified at a time; ``patience``: seconds to wait where there is no node at all.

    A sequence with at least one node never waits. A drafter that was waited for in vain is waited for again
    only when something has come: one that hangs costs this once.
    """

    name = "swiftspec"

    def __init__(
        self, link: Link, *, budget: int, patience: float = 0.0, max_nodes: int = 64, vocab: int = 0
    ) -> None:
        self.max_draft = budget
        self.books: dict[int, TailBook] = {}
        self.waits = 0
        self.empty = 0  # contexts that found no draft
        self.refused: Counter[str] = Counter()
        self._link = link
        self._patience = patience
        self._max_nodes = max_nodes
        self._vocab = vocab
        self._by_stream: dict[int, TailBook] = {}
        self._drafted: set[int] = set()  # sequences that have a draft in the step that runs
        self._outcomes: deque[Told] = deque(maxlen=KEPT)
        self._numbers: Iterator[int] = itertools.count(1)
        self._told = False
        self._silent = False  # it was waited for in vain, and not heard of since

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """A stream of its own for each life of a sequence."""
        book = TailBook(next(self._numbers), tokens, max_nodes=self._max_nodes, vocab=self._vocab)
        self.books[seq] = self._by_stream[book.stream] = book
        self._link.send(book.sync())

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """The likeliest subtree of each stream, of what has come until now."""
        self._receive(0.0)
        books = [self.books[c.seq] for c in contexts]
        self._wait([b for b, c in zip(books, contexts, strict=True) if c.room > 0])
        trees = [
            b.draft(min(self.max_draft, c.room), self.name) for b, c in zip(books, contexts, strict=True)
        ]
        self.empty += sum(tree is None for tree in trees)
        self._drafted = {c.seq for c, tree in zip(contexts, trees, strict=True) if tree is not None}
        return trees

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Take what came while the target ran, which hangs below the old root; re-root, and tell the
        drafter."""
        self._receive(0.0)
        book = self.books[seq]
        hits, age = book.tree.stats.hits, book.tree.stats.age
        self._link.send(book.commit(tokens))
        if seq in self._drafted:
            self._drafted.discard(seq)
            self._outcomes.append(Told(book.tree.stats.hits > hits, age))

    def told(self) -> list[Told]:
        """Of each verdict on a draft since this was last asked: whether its newest token was in the tree, and
        the age of that."""
        out = list(self._outcomes)
        self._outcomes.clear()
        return out

    def forget(self, seq: int) -> None:
        """Its stream ends."""
        book = self.books.pop(seq)
        del self._by_stream[book.stream]
        self.refused += book.refused
        self._link.send(Close(book.stream))

    def nbytes(self) -> int:
        """Bytes of the drafter's side, wherever that is."""
        return self._link.nbytes()

    def warnings(self) -> tuple[str, ...]:
        """Said once: nobody listens any more."""
        if self._told or self._link.alive:
            return ()
        self._told = True
        why = f" ({self._link.broken})" if self._link.broken else ""
        return (
            f"{self.name}: the drafter's process has ended{why}; decoding goes on without drafts, "
            "until a recipe is applied again.",
        )

    def _wait(self, books: Sequence[TailBook]) -> None:
        """Until every stream has a node, or nobody is there, or patience ends."""
        if not self._patience or self._silent or not self._lacks(books) or not self._link.alive:
            return
        self.waits += 1
        until = self._link.clock() + self._patience
        # What comes first may have been made for a root that is no more.
        while self._lacks(books) and self._link.alive and (left := until - self._link.clock()) > 0:
            if not self._receive(left):
                self._silent = True
                break

    def _lacks(self, books: Sequence[TailBook]) -> bool:
        return any(not len(b.tree) for b in books)

    def _receive(self, wait: float) -> bool:
        """Take what has come; false where nothing has."""
        messages = self._link.poll(wait)
        self._silent = self._silent and not messages
        for message in messages:
            if isinstance(message, TailStream):
                book = self._by_stream.get(message.stream)
                if book is not None:
                    self._take(book, message)
                else:
                    self.refused["stream"] += len(message.nodes)
        return bool(messages)

    def _take(self, book: TailBook, tail: TailStream) -> None:
        book.receive(tail)
