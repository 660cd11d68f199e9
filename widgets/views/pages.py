"""Who owns which page? One cell per page of the pool: owners, what is shared, what is empty, what is open.

The picture is of one moment, the latest at which a sequence ran. *Shared*: several sequences refer to the
page. *Open*: kept in full precision until it is full and coded. Empty slots of a held page serve nobody else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.engine.snapshot import GroupPages, PageSnapshot
from workbench.widgets import figures
from workbench.widgets.palette import MEMORY, Theme
from workbench.widgets.table import Table

MAX_CELLS = 256  # pages drawn; the rest is counted
_COLUMNS = 32
_COLOURS = {key: colour for key, _, colour in MEMORY}


@dataclass(frozen=True)
class Cell:
    """One page. ``state``: held, cached or free; ``filled``: share of its slots that hold a token."""

    page: int
    state: str
    owners: tuple[int, ...] = ()
    filled: float = 0.0
    open: bool = False

    @property
    def label(self) -> str:
        """The owner's number; how many there are if it is shared."""
        return (
            ""
            if not self.owners
            else str(self.owners[0])
            if len(self.owners) == 1
            else f"×{len(self.owners)}"
        )

    @property
    def words(self) -> str:
        """Everything about the page in one line."""
        if self.state != "held":
            return f"page {self.page}: {self.state}"
        who = ", ".join(map(str, self.owners))
        many = "sequences" if len(self.owners) > 1 else "sequence"
        return f"page {self.page}: {many} {who}, {self.filled:.0%} filled" + (", open" if self.open else "")


def cells(group: GroupPages) -> list[Cell]:
    """Pages 1 up to the last one that is held or cached, at most ``MAX_CELLS``."""
    owners: dict[int, list[int]] = {}
    filled: dict[int, float] = {}
    for number, seq in enumerate(group.sequences, 1):
        for i, page in enumerate(seq.pages):
            owners.setdefault(page, []).append(number)
            share = min(max(seq.filled / group.page_size - i, 0.0), 1.0)
            filled[page] = max(filled.get(page, 0.0), share)
    cached, opened = set(group.cached), set(group.open)
    last = min(max([*owners, *cached, 0]), MAX_CELLS)
    return [
        Cell(
            page,
            "held" if page in owners else "cached" if page in cached else "free",
            tuple(owners.get(page, ())),
            filled.get(page, 0.0),
            page in opened,
        )
        for page in range(1, last + 1)
    ]


def figure(snapshots: Sequence[PageSnapshot], theme: Theme = "auto") -> Any:
    """Cells of the first KV group in rows of 32: filled slots solid, shared pages with a thick outline."""
    snapshot = snapshots[-1]
    group = snapshot.groups[0]
    shown = cells(group)
    title = f"Pages of {group.page_size} tokens at engine step {snapshot.step}"
    out = figures.new(title, theme=theme, note=summary(group))
    for cell in shown:
        x, y = (cell.page - 1) % _COLUMNS, (cell.page - 1) // _COLUMNS
        box = {"type": "rect", "x0": x + 0.06, "x1": x + 0.94}
        colour = _COLOURS["fragmentation" if cell.open else "kv_payload"]
        outline = {
            "color": colour if cell.state == "held" else _COLOURS["kv_free"],
            "width": 2.5 if len(cell.owners) > 1 else 1,
            "dash": "dash" if cell.open else "dot" if cell.state == "free" else "solid",
        }
        back = _COLOURS["kv_cached"] if cell.state == "cached" else "rgba(0,0,0,0)"
        out.add_shape(**box, y0=y + 0.06, y1=y + 0.94, line=outline, fillcolor=back)
        if cell.filled:
            low = y + 0.94 - 0.88 * cell.filled
            out.add_shape(**box, y0=low, y1=y + 0.94, line={"width": 0}, fillcolor=colour, opacity=0.45)
    out.add_scatter(
        x=[(c.page - 1) % _COLUMNS + 0.5 for c in shown], y=[(c.page - 1) // _COLUMNS + 0.5 for c in shown],
        text=[c.label for c in shown], customdata=[c.words for c in shown], mode="text", showlegend=False,
        hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    rows = max(-(-len(shown) // _COLUMNS), 1)
    out.update_xaxes(visible=False, range=[0, _COLUMNS], fixedrange=True)
    out.update_yaxes(visible=False, range=[rows, 0], fixedrange=True)
    out.update_layout(height=104 + 32 * rows, margin={"l": 8, "r": 8, "b": 48})
    out.layout.annotations[0].update(y=0, yshift=-32)
    return out


def table(snapshots: Sequence[PageSnapshot]) -> Table:
    """One row per running sequence and KV group."""
    rows = []
    snapshot = snapshots[-1]
    for g, group in enumerate(snapshot.groups):
        for number, seq in enumerate(group.sequences, 1):
            held, opened = set(seq.pages) - {0}, set(group.open)  # 0: given back behind a window
            rows.append(
                (
                    number, g, seq.filled, len(held), sum(group.refs[p] > 1 for p in held),
                    len(held & opened), len(seq.pages) * group.page_size - seq.filled,
                )
            )  # fmt: skip
    columns = ("sequence", "KV group", "tokens", "pages", "shared pages", "open pages", "empty slots")
    notes = " ".join(
        f"Group {g}: {summary(group)}." if len(snapshot.groups) > 1 else f"{summary(group)}."
        for g, group in enumerate(snapshot.groups)
    )
    return Table.of(columns, rows, note=f"After engine step {snapshot.step} (measured). {notes}")


def summary(group: GroupPages) -> str:
    """The pool in one line."""
    held, cached = len(group.refs), len(group.cached)
    return (
        f"{held} of {group.pages} pages held, {sum(n > 1 for n in group.refs.values())} of them shared and "
        f"{len(group.open)} open; {cached} cached, {group.pages - held - cached} free; "
        f"{group.page_size} tokens a page"
    )


def drawn(snapshot: PageSnapshot) -> dict[str, Any]:
    """What the front end draws: cells and one line per KV group, and the table."""
    groups = [
        {
            "cells": [
                [c.state, c.label, round(c.filled, 3), c.open, len(c.owners), c.words] for c in cells(g)
            ],
            "summary": summary(g),
            "more": max(max([*g.refs, *g.cached, 0]) - MAX_CELLS, 0),
        }
        for g in snapshot.groups
    ]
    shown = table((snapshot,))  # its note is the groups' summaries again
    rows = [[str(v) for v in row] for row in shown.rows]
    return {
        "step": snapshot.step,
        "groups": groups,
        "table": {
            "columns": list(shown.columns),
            "rows": rows,
            "note": f"After engine step {snapshot.step}, measured.",
        },
    }
