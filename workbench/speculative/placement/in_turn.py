"""What every drafter's side has in common: streams by number, their beginnings, verdicts and ends, and turns.

Messages name a stream by its number. A verdict must follow what the side knows of it: one that does not ends
the stream, for whatever it drafted from there would be of another text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from workbench.speculative.placement.messages import (
    Close,
    DraftSync,
    Message,
    TailStream,
    VerifyCommit,
)
from workbench.speculative.placement.tree_kv import TreeKV


class Followed(Protocol):
    """A stream: its committed ids, and an end that gives back what it holds."""

    @property
    def tokens(self) -> Sequence[int]:
        """Ids that the target committed, as far as this side knows."""
        ...

    def close(self) -> None:
        """Give back everything."""
        ...


Stream = TypeVar("Stream", bound=Followed)


class InTurn(ABC, Generic[Stream]):
    """Streams by number, served in turn; a subclass says how one begins and what a verdict does to it."""

    def __init__(self, kv: TreeKV) -> None:
        self.kv = kv
        self.made = 0
        self.closed = False
        self.out_of_step = 0  # verdicts that did not follow what was known: their stream ends
        self.streams: dict[int, Stream] = {}

    @abstractmethod
    def begin(self, tokens: Sequence[int]) -> Stream:
        """A stream of these committed ids, at least one."""

    @abstractmethod
    def settle(self, number: int, stream: Stream, tokens: Sequence[int]) -> TailStream | None:
        """A verdict that follows what was known; the answer to it, if there is one at once."""

    def told(self, message: Message) -> None:
        """A message of another kind: nothing to this side, unless a subclass says so."""

    def handle(self, message: Message) -> TailStream | None:
        """What the target said; an answer, if there is one at once."""
        match message:
            case DraftSync(stream=number, tokens=tokens):
                self.end(number)
                if tokens:
                    self.streams[number] = self.begin(tokens)
            case VerifyCommit(stream=number, pre_len=pre_len, tokens=tokens):
                stream = self.streams.get(number)
                if stream is None:
                    return None
                if pre_len == len(stream.tokens) and tokens:
                    return self.settle(number, stream, tokens)
                self.out_of_step += 1
                self.end(number)
            case Close(stream=closed):
                for number in list(self.streams) if closed is None else [closed]:
                    self.end(number)
                self.closed = self.closed or closed is None
            case _:
                self.told(message)
        return None

    def turns(self) -> Iterator[tuple[int, Stream]]:
        """Every stream once, the one that waited longest first; each that is looked at is last from then."""
        for number in list(self.streams):
            stream = self.streams.pop(number)
            self.streams[number] = stream
            yield number, stream

    def end(self, number: int) -> None:
        """The stream is over, if there is one of this number."""
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.close()
