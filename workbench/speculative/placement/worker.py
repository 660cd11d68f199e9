"""The drafter's side: it reads what the target committed and never stops growing the trees of its streams.

Free-running, as in SwiftSpec (arXiv 2506.11309): it waits for nothing but work. How it is run (in this
process on a virtual clock, in a process of its own) is not its business: messages go in and come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from workbench.speculative.placement.draft_stream import DraftStream
from workbench.speculative.placement.evolving_tree import TreeStats
from workbench.speculative.placement.messages import (
    Close,
    DraftSync,
    Message,
    TailStream,
    VerifyCommit,
)
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


class DraftWorker:
    """Streams by number, served in turn."""

    def __init__(self, kv: TreeKV, growth: Growth | None = None) -> None:
        self.kv = kv
        self.made = 0
        self.growth = growth or Growth()
        self.streams: dict[int, DraftStream] = {}
        self.closed = False
        self.out_of_step = 0  # verdicts that did not follow what was known: their stream ends
        self.stats: list[TreeStats] = []  # of streams that ended

    def handle(self, message: Message) -> TailStream | None:
        """What the target said; the answer to a verdict is the whole tree: what was on its way is stale."""
        match message:
            case DraftSync(stream=stream, tokens=tokens):
                self._end(stream)
                if tokens:
                    g = self.growth
                    self.streams[stream] = DraftStream(
                        self.kv, tokens, top=g.top, max_nodes=g.max_nodes, max_depth=g.max_depth
                    )
            case VerifyCommit(stream=stream, pre_len=pre_len, tokens=tokens):
                own = self.streams.get(stream)
                if own is None:
                    return None
                if pre_len != len(own.tokens) or not tokens:
                    self.out_of_step += 1
                    self._end(stream)
                    return None
                own.commit(tokens)
                return self._tail(stream, own.tree.best(len(own.tree)))
            case Close(stream=stream):
                for s in list(self.streams) if stream is None else [stream]:
                    self._end(s)
                self.closed = self.closed or stream is None
            case _:
                pass  # not for this side
        return None

    @property
    def has_work(self) -> bool:
        """Whether :meth:`work` would do something."""
        return any(s.batch(self.growth.width) for s in self.streams.values())

    def work(self) -> tuple[TailStream | None, int]:
        """Grow the stream whose turn it is by one batch: its new nodes, and the rows this took."""
        for number in list(self.streams):
            stream = self.streams.pop(number)
            self.streams[number] = stream  # last in turn
            if stream.batch(self.growth.width):
                made, rows = stream.grow(self.growth.width)
                self.made = len(made)
                return self._tail(number, made), rows
        return None, 0

    def _tail(self, number: int, nodes: list[int]) -> TailStream | None:
        stream = self.streams[number]
        return TailStream(number, len(stream.tokens), stream.tree.tail(nodes)) if nodes else None

    def _end(self, number: int) -> None:
        stream = self.streams.pop(number, None)
        if stream is not None:
            self.stats.append(stream.tree.stats)
            stream.close()
