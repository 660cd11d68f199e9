"""Who owns which page, step by step: tables of a run as boxes, with what happened between two pictures.

A lane is a sequence in a KV group, its axis the slots of its table: where a page is not full, the hole that
nobody else can use is drawn. The last lane holds pages that nobody owns and the prefix cache still finds, the
next to be evicted first. Numbers in boxes are physical page ids, so sharing shows as equal numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.engine.snapshot import GroupPages, PageSnapshot, SequencePages
from workbench.spec.errors import RecordError
from workbench.spec.events import Event, StepEvent
from workbench.widgets.kv_views.page_changes import Change, Names, changes, number
from workbench.widgets.lanes import Box, Frame, Kind, Lanes
from workbench.widgets.palette import MEMORY, Theme
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.session import Session

MOST = 32  # frames in a figure: those at which something happened come first
KEPT = 4096  # pictures kept of a run
_COLOURS = {key: colour for key, _, colour in MEMORY}
KINDS = (
    Kind("held", "held by one sequence", _COLOURS["kv_payload"]),
    Kind("shared", "shared", _COLOURS["kv_payload"], "/"),
    Kind("copied", "copied just now", _COLOURS["kv_meta"], "x"),
    Kind("open", "open: full precision until full", _COLOURS["fragmentation"], "-"),
    Kind("hole", "hole: allocated, empty", _COLOURS["fragmentation"], ".", hollow=True, dash=True),
    Kind("null", "given back behind the window", _COLOURS["weights"], "x", hollow=True, dash=True),
    Kind("cached", "cached: nobody's, still findable", _COLOURS["kv_payload"], "\\", hollow=True),
)


@dataclass
class PageFilm:
    """Pictures of the page tables in order; :func:`watch_pages` takes them while a session works."""

    snapshots: list[PageSnapshot] = field(default_factory=list)
    names: dict[tuple[str, int], int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    def take(self, snapshot: PageSnapshot) -> None:
        """Add a picture; what happened since the one before is read off both."""
        number(snapshot, self.names)
        before = self.snapshots[-1] if self.snapshots else None
        self.changes += changes(before, snapshot, self.names)
        self.snapshots.append(snapshot)
        del self.snapshots[:-KEPT]

    def count(self, what: str) -> int:
        """How often something happened, e.g. ``copied``, in the first KV group."""
        return sum(c.what == what for c in self.changes if c.group == 0)

    def lanes(self) -> Lanes:
        """The picture; raises :class:`RecordError` when no sequence ran. It opens at the first copy."""
        shown = self._shown()
        if not shown:
            raise RecordError("No sequence ran while pages were watched.", hint="Generate inside the block.")
        groups = len(shown[0].groups)
        rows = [(who, g) for who in self.names.values() for g in range(groups)]
        names = [f"sequence {who}" + (f", group {g}" if groups > 1 else "") for who, g in rows]
        lane = {row: i for i, row in enumerate(rows)}
        if any(g.cached for s in shown for g in s.groups):
            names += [f"cached{f', group {g}' if groups > 1 else ''}" for g in range(groups)]
        frames = tuple(self._frame(s, lane, len(rows)) for s in shown)
        copied = {c.step for c in self.changes if c.what == "copied"}
        first = next((i for i, s in enumerate(shown) if s.step in copied), len(shown) - 1)
        size = shown[0].groups[0].page_size
        return Lanes(
            f"Page tables, {size} tokens a page (measured)", "slot of the sequence, tokens",
            tuple(names), KINDS, frames, first, "engine step",
        )  # fmt: skip

    def figure(self, theme: Theme = "auto") -> Any:
        """The film as a plotly figure with a slider."""
        return self.lanes().figure(theme)

    def live(self) -> Any:
        """The film with a slider that the keyboard moves."""
        return self.lanes().live()

    def table(self) -> Table:
        """What happened, in order."""
        rows = [(c.step, c.group, c.what, c.words) for c in self.changes]
        counted = Counter(c.what for c in self.changes)
        note = ", ".join(f"{n} × {what}" for what, n in counted.items())
        return Table.of(
            ("engine step", "KV group", "what", "in words"),
            rows,
            note=f"Read off the tables (measured): {note}.",
        )

    def use(self) -> Table:
        """Slots at the fullest picture: held, filled, empty, and how many tokens share."""
        rows = []
        last = self._fullest()
        for g, group in enumerate(last.groups):
            slots = len(group.refs) * group.page_size
            logical = sum(s.filled - _null(s) * group.page_size for s in group.sequences)
            empty = holes(group)
            rows.append(
                (g, len(group.refs), slots, slots - empty, empty, f"{1 - empty / max(slots, 1):.1%}", logical)
            )
        columns = ("KV group", "pages held", "slots", "filled", "empty", "in use", "tokens of all sequences")
        note = (
            f"At engine step {last.step}, the fullest (measured). A shared slot counts once, so tokens "
            "of all sequences can be more than what is filled."
        )
        return Table.of(columns, rows, note=note)

    # -- inside -----------------------------------------------------------------------------------------

    def _fullest(self) -> PageSnapshot:
        if not self.snapshots:
            raise RecordError("No pages were watched.", hint="Generate inside the block.")
        return max(self.snapshots, key=lambda s: (sum(len(g.refs) for g in s.groups), s.step))

    def _shown(self) -> list[PageSnapshot]:
        """Pictures with a sequence in them; at most ``MOST``: where something happened, then evenly."""
        ran = [s for s in self.snapshots if any(g.sequences for g in s.groups)]
        ended = [s for s in self.snapshots[-1:] if s not in ran and any(g.cached for g in s.groups)]
        if len(ran) <= MOST:
            return ran + ended
        moments = {c.step for c in self.changes}
        told = [s for s in ran if s.step in moments]
        told = told[:: -(-len(told) // MOST) or 1]
        others = [s for s in ran if s.step not in moments]
        room = MOST - len(told)
        others = others[:: -(-len(others) // room)] if room > 0 else []
        return sorted([*told, *others], key=lambda s: s.step) + ended

    def _frame(self, snapshot: PageSnapshot, lane: dict[tuple[int, int], int], owned: int) -> Frame:
        boxes: list[Box] = []
        for g, group in enumerate(snapshot.groups):
            copied = {
                c.pages[1] for c in self.changes if (c.step, c.group, c.what) == (snapshot.step, g, "copied")
            }
            who = owners(group, self.names)
            for seq in group.sequences:
                at = lane[self.names[seq.request_id, seq.sample], g]
                boxes += table_boxes(at, seq, group, who, copied)
            for i, page in enumerate(group.cached):
                at = owned + g
                start = i * group.page_size
                boxes.append(
                    Box(at, start, start + group.page_size, "cached", str(page), f"page {page}: cached")
                )
        told = [c.words for c in self.changes if c.step == snapshot.step]
        more = f"; {len(told) - 2} more" if len(told) > 2 else ""
        words = f"step {snapshot.step}: " + ("; ".join(told[:2]) + more if told else "tokens are written")
        return Frame(words, tuple(boxes))


def owners(group: GroupPages, names: Names) -> dict[int, list[int]]:
    """Numbers of the sequences that refer to each page."""
    found: dict[int, list[int]] = {}
    for seq in group.sequences:
        for page in seq.pages:
            if page:
                found.setdefault(page, []).append(names[seq.request_id, seq.sample])
    return found


def holes(group: GroupPages) -> int:
    """Slots of held pages that hold no token of any sequence."""
    filled: dict[int, int] = {}
    for seq in group.sequences:
        for i, page in enumerate(seq.pages):
            if page:
                here = min(max(seq.filled - i * group.page_size, 0), group.page_size)
                filled[page] = max(filled.get(page, 0), here)
    return sum(group.page_size - n for n in filled.values())


def table_boxes(
    lane: int, seq: SequencePages, group: GroupPages, who: dict[int, list[int]], copied: set[int]
) -> Iterator[Box]:
    """One sequence's table as boxes: filled parts, one box for the holes at its end, null pages."""
    size, opened = group.page_size, set(group.open)
    for i, page in enumerate(seq.pages):
        start = i * size
        if not page:
            yield Box(lane, start, start + size, "null", "", f"entry {i + 1}: given back, the null page")
            continue
        end = min(max(seq.filled, start), start + size)
        if end == start:
            break
        others = who[page]
        kind = (
            "copied"
            if page in copied
            else "shared"
            if len(others) > 1
            else "open"
            if page in opened
            else "held"
        )
        shared = f", shared by sequences {', '.join(map(str, others))}" if len(others) > 1 else ""
        coded = ", open (full precision)" if page in opened else ""
        words = f"page {page}: {end - start} of {size} slots filled{shared}{coded}"
        yield Box(lane, start, end, kind, str(page), words)
    last = len(seq.pages) * size
    if seq.filled < last:
        yield Box(lane, seq.filled, last, "hole", "", f"{last - seq.filled:,} slots allocated and empty")


def _null(seq: SequencePages) -> int:
    return sum(not p for p in seq.pages)


@contextmanager
def watch_pages(session: Session) -> Iterator[PageFilm]:
    """Take a picture of the page tables after every step of a session, as long as the block lasts."""
    film = PageFilm()
    failed: list[Exception] = []

    def look(event: Event) -> None:
        try:
            if isinstance(event, StepEvent) and (picture := session.pages()) is not None:
                film.take(picture)
        except Exception as err:  # the session drops a listener that fails, without a word
            failed.append(err)
            raise

    stop = session.listen(look)
    try:
        yield film
    finally:
        stop()
    if failed:
        raise failed[0]


def films(pictures: Sequence[PageSnapshot]) -> PageFilm:
    """The film of pictures that were taken elsewhere."""
    film = PageFilm()
    for picture in pictures:
        film.take(picture)
    return film
