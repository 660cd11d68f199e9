"""What may run beside what? The two overlaps of FlashAttention-3, recorded from the kernel's source.

*Ping-pong*: while one warpgroup computes its softmax, the other one's products are in flight. *Within a
warpgroup*: the softmax of a tile stands between the issue of P V of the tile before and the wait for it. The
axis is the order of events under one schedule of the emulator, not time. Whether the compiler keeps the
second overlap is a question for the machine code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from workbench import kernels
from workbench.spec.errors import OptionError
from workbench.widgets import figures
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table

BN, DIM = 128, 64
_QK, _PV, _SOFTMAX, _COPY = "#2f7fd1", "#8a63c9", "#d9822b", "#12908e"


@dataclass(frozen=True)
class Span:
    """Something that lasted from event ``start`` to ``end``; ``tile`` counts a lane's tiles from 1."""

    lane: str
    kind: str
    tile: int
    start: int
    end: int


@dataclass(frozen=True)
class Told:
    """What one schedule told: spans of the block, and what can be counted in them.

    ``beside_own`` and ``beside_other``: softmaxes with a product of the same, of the other warpgroup in
    flight. ``lead``: by how many tiles one warpgroup's products were ever ahead of the other's.
    """

    schedule: str
    spans: tuple[Span, ...]
    softmaxes: int
    beside_own: int
    beside_other: int
    lead: int


@dataclass(frozen=True)
class Overlap:
    """Every schedule of the emulator, with ping-pong and without.

    ``drawn`` is the schedule in the figure; without ping-pong it is the one in which a warpgroup leads most.
    """

    tiles: int
    with_turns: tuple[Told, ...]
    without: tuple[Told, ...]
    drawn: int

    def figure(self, theme: Theme = "auto", *, pingpong: bool = True) -> Any:
        """Lanes of the producer and of both warpgroups under one schedule."""
        told = self.with_turns[self.drawn] if pingpong else max(self.without, key=lambda t: t.lead)
        kind = "with" if pingpong else "without"
        note = f"Schedule: {told.schedule}. Order of events in the emulator, not time."
        out = figures.new(
            f"One block of FlashAttention-3, {kind} ping-pong (simulated)",
            theme=theme, x="event of the block", note=note,
        )  # fmt: skip
        for name, colour in (("copy", _COPY), ("Q K", _QK), ("softmax", _SOFTMAX), ("P V", _PV)):
            mine = [s for s in told.spans if s.kind == name]
            out.add_bar(
                orientation="h", name=name, y=[s.lane for s in mine], base=[s.start for s in mine],
                x=[s.end - s.start for s in mine], text=[str(s.tile) for s in mine],
                marker={"color": colour, "line": {"width": 0}},
                textposition="inside", insidetextanchor="middle",
                textfont={"color": "#ffffff", "size": 10}, constraintext="none", width=0.72,
                customdata=[f"{s.lane}, tile {s.tile}: events {s.start} to {s.end}" for s in mine],
                hovertemplate="%{customdata}<extra></extra>",
            )  # fmt: skip
        lanes = list(dict.fromkeys(s.lane for s in sorted(told.spans, key=lambda s: _LANES.index(s.lane))))
        out.update_yaxes(categoryorder="array", categoryarray=lanes[::-1], showgrid=False)
        out.update_layout(barmode="overlay", height=430, margin={"l": 150, "b": 84})
        out.layout.annotations[0].update(y=0, yshift=-74)
        return out

    def table(self) -> Table:
        """What holds under every schedule, with ping-pong and without."""
        rows = []
        for name, all_told in (("with ping-pong", self.with_turns), ("without", self.without)):
            n = all_told[0].softmaxes
            rows.append(
                (
                    name,
                    f"{_range(t.beside_own for t in all_told)} of {n}",
                    f"{_range(t.beside_other for t in all_told)} of {n}",
                    _range(t.lead for t in all_told),
                    "simulated",
                )
            )
        note = (
            f"{self.tiles} KV tiles, {len(self.with_turns)} adversarial schedules, lowest to highest. Beside "
            "its own P V: a property of the source, the same under every schedule; the first tile of a "
            "warpgroup has none yet. Ping-pong keeps the warpgroups at most a tile apart. How long anything "
            "takes, only a GPU can say."
        )
        columns = (
            "", "softmax beside its own P V", "beside the other warpgroup", "one ahead by (tiles)", "tag",
        )  # fmt: skip
        return Table.of(columns, rows, note=note)


_LANES = (
    "producer: K", "producer: V",
    "warpgroup 0: Q K", "warpgroup 0: softmax", "warpgroup 0: P V",
    "warpgroup 1: Q K", "warpgroup 1: softmax", "warpgroup 1: P V",
)  # fmt: skip


def record_overlap(tiles: int = 6, *, seed: int = 0, drawn: int = 5) -> Overlap:
    """Run one block of ``fa3_fwd`` over ``tiles`` KV tiles under every schedule of the emulator.

    Raises ``OptionError`` for fewer than two tiles or an unknown schedule, ``MissingExtra`` without triton.
    """
    kernels.load("fa3_fwd")
    from workbench.kernels.emulator import SCHEDULES

    if tiles < 2 or not 0 <= drawn < len(SCHEDULES):
        raise OptionError(
            f"{tiles} tiles, schedule {drawn}.",
            hint=f"At least 2 tiles; schedules 0 to {len(SCHEDULES) - 1}.",
        )
    with_turns, without = (
        tuple(_told(s, tiles, seed, pingpong) for s in SCHEDULES) for pingpong in (True, False)
    )
    return Overlap(tiles, with_turns, without, drawn)


def _told(schedule: Any, tiles: int, seed: int, pingpong: bool) -> Told:
    """Launch the kernel with a recorder and read what it noted."""
    from workbench.kernels.attention.fa3_fwd import fa3_fwd
    from workbench.kernels.emulator import Emulator, Recorder

    g = torch.Generator().manual_seed(seed)
    keys = BN * tiles
    q, k, v = (torch.randn(n, 1, DIM, generator=g).bfloat16() for n in (128, keys, keys))
    recorder = Recorder()
    emulator = Emulator(schedule, blocks=1, recorder=recorder)
    fa3_fwd(q, k, v, [128], [keys], causal=False, emulator=emulator, pingpong=pingpong)
    events = recorder.block(0)
    softmaxes = [(e.partition, e.order) for e in events if e.kind == "exp2" and e.number == 64 * BN]
    flights = recorder.flights(0)

    def beside(own: bool) -> int:
        return sum(
            any((f.partition == who) == own and f.start < at < f.end for f in flights)
            for who, at in softmaxes
        )

    lead, ahead = 0, {0: 0, 1: 0}
    for event in events:
        if event.kind == "issues" and event.what.startswith("k_"):
            ahead[event.partition] += 1
            lead = max(lead, abs(ahead[0] - ahead[1]))
    told = f"copies {schedule.copies}, products {schedule.products}, seed {schedule.seed}"
    return Told(told, tuple(_spans(events, flights)), len(softmaxes), beside(True), beside(False), lead)


def _spans(events: Sequence[Any], flights: Sequence[Any]) -> list[Span]:
    """Copies, products and softmaxes as bars."""
    found: list[Span] = []
    counts: dict[str, int] = {}

    def add(lane: str, kind: str, start: int, end: int) -> None:
        counts[lane] = counts.get(lane, 0) + 1
        found.append(Span(lane, kind, counts[lane], start, end))

    for event in events:
        if event.kind == "copies" and event.what[0] in "kv":
            landed = (e.order for e in events[event.order :] if (e.kind, e.what) == ("landed", event.what))
            add(f"producer: {event.what[0].upper()}", "copy", event.order, next(landed))
        elif event.kind == "exp2" and event.number == 64 * BN:
            earlier = [e for e in events[: event.order] if e.partition == event.partition]
            start = max(e.order for e in earlier if e.kind == "awaits")
            add(f"warpgroup {event.partition}: softmax", "softmax", start, event.order + 1)
    for flight in flights:
        name = "Q K" if flight.what.startswith("k_") else "P V"
        add(f"warpgroup {flight.partition}: {name}", name, flight.start, flight.end)
    return found


def _range(values: Any) -> str:
    low, *_, high = sorted(values)
    return str(low) if low == high else f"{low}–{high}"
