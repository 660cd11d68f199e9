"""What happened in an emulated block, in order: barriers, copies, products and exponentials.

Order only: a schedule of the emulator is adversarial and knows no time. What the order can show is what a
kernel's source *allows* to overlap: an exponential that is evaluated between the issue of a product and the
wait for it may run beside it. Whether the compiler keeps that order is read in the machine code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal[
    "waits", "passes", "arrives", "copies", "landed", "issues", "retired", "awaits", "exp2", "stores"
]


@dataclass(frozen=True)
class Event:
    """One event. ``order``: place among the events of its block; ``partition``: index of who did it.

    ``what`` is the barrier (``k_full[1]``), the target of a copy, or what a product multiplies with.
    ``number`` is the product's number within its partition, or for *awaits* how many products are certainly
    over, or for *exp2* how many exponentials. The partition is -1 outside of partitions.
    """

    order: int
    block: int
    partition: int
    kind: Kind
    what: str = ""
    number: int = 0


@dataclass(frozen=True)
class Flight:
    """A product between two events: ``start`` its issue, ``end`` the wait that made sure it was over.

    ``what``: the shared memory of its second operand (``k_smem[0]``).
    """

    block: int
    partition: int
    number: int
    what: str
    start: int
    end: int


@dataclass
class Recorder:
    """Give one to an ``Emulator``; it collects the events of all blocks it launches."""

    events: list[Event] = field(default_factory=list)
    _next: dict[int, int] = field(default_factory=dict)

    def note(self, block: int, partition: int, kind: Kind, what: str = "", number: int = 0) -> None:
        """Append an event."""
        order = self._next.get(block, 0)
        self._next[block] = order + 1
        self.events.append(Event(order, block, partition, kind, what, number))

    def block(self, block: int) -> list[Event]:
        """The events of one block."""
        return [e for e in self.events if e.block == block]

    def flights(self, block: int) -> list[Flight]:
        """Products of one block, from their issue to the first wait that covers them."""
        return list(self._flights(self.block(block)))

    def _flights(self, events: list[Event]) -> Iterator[Flight]:
        for i, issued in enumerate(events):
            if issued.kind == "issues":
                ends = (
                    e.order
                    for e in events[i:]
                    if e.partition == issued.partition and e.kind == "awaits" and e.number >= issued.number
                )
                end = next(ends, events[-1].order)
                yield Flight(issued.block, issued.partition, issued.number, issued.what, issued.order, end)
