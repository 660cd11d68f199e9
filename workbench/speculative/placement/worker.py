"""The drafter's side: it reads what the target committed and never stops growing the trees of its streams.

Free-running, as in SwiftSpec (arXiv 2506.11309): it waits for nothing but work. How it is run (in this
process on a virtual clock, in a process of its own) is not its business: messages go in and come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from workbench.speculative.placement.draft_stream import DraftStream
from workbench.speculative.placement.evolving_tree import TreeStats
from workbench.speculative.placement.in_turn import InTurn
from workbench.speculative.placement.messages import Message, TailStream
from workbench.speculative.placement.tree_kv import TreeKV


@dataclass(frozen=True)
class Growth:
    """How trees grow: nodes expanded at a time, children of each, nodes held at most, and how deep."""

    width: int = 4
    top: int = 3
    max_nodes: int = 48
    max_depth: int = 12


class Worker(Protocol):
    """A drafter's side, however it drafts: messages in, batches of work, messages out."""

    kv: TreeKV
    closed: bool
    made: int  # nodes that the last batch added

    def handle(self, message: Message) -> TailStream | None:
        """What the target said; an answer, if there is one at once."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether :meth:`work` would do something."""
        ...

    def work(self) -> tuple[TailStream | None, int]:
        """One batch: what is to be told, and the rows it took."""
        ...


class DraftWorker(InTurn[DraftStream]):
    """Streams by number, served in turn."""

    def __init__(self, kv: TreeKV, growth: Growth | None = None) -> None:
        super().__init__(kv)
        self.growth = growth or Growth()
        self.stats: list[TreeStats] = []  # of streams that ended

    def begin(self, tokens: Sequence[int]) -> DraftStream:
        """A tree below the committed ids."""
        g = self.growth
        return DraftStream(self.kv, tokens, top=g.top, max_nodes=g.max_nodes, max_depth=g.max_depth)

    def settle(self, number: int, stream: DraftStream, tokens: Sequence[int]) -> TailStream | None:
        """The answer to a verdict is the whole tree: what was on its way is stale."""
        stream.commit(tokens)
        return self._tail(number, stream, stream.tree.best(len(stream.tree)))

    @property
    def has_work(self) -> bool:
        """Whether :meth:`work` would do something."""
        return any(s.batch(self.growth.width) for s in self.streams.values())

    def work(self) -> tuple[TailStream | None, int]:
        """Grow the stream whose turn it is by one batch: its new nodes, and the rows this took."""
        for number, stream in self.turns():
            if stream.batch(self.growth.width):
                made, rows = stream.grow(self.growth.width)
                self.made = len(made)
                return self._tail(number, stream, made), rows
        return None, 0

    def end(self, number: int) -> None:
        """The stream is over; how its tree did is kept."""
        if number in self.streams:
            self.stats.append(self.streams[number].tree.stats)
        super().end(number)

    def _tail(self, number: int, stream: DraftStream, nodes: list[int]) -> TailStream | None:
        return TailStream(number, len(stream.tokens), stream.tree.tail(nodes)) if nodes else None
