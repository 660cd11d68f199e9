"""Who owns which page? One cell per page of the pool: owners, what is shared, what is empty, what is open.

The picture is of one moment, the latest at which a sequence ran. *Shared*: several sequences refer to the
page. *Open*: kept in full precision until it is full and coded. Empty slots of a held page serve nobody else.
*Copied*: made by copy-on-write during the run. A page behind a window is given back, and the null page stands
in its place. The tables themselves, step by step, are drawn by ``widgets/kv_views/page_film.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.engine.snapshot import GroupPages, PageSnapshot
from workbench.widgets import figures
from workbench.widgets.kv_views.page_changes import Change
from workbench.widgets.palette import MEMORY, Theme
from workbench.widgets.table import Table

MAX_CELLS = 256  # pages drawn; the rest is counted
TOLD = 6  # of what happened, the latest
_COLUMNS = 32
_COLOURS = {key: colour for key, _, colour in MEMORY}


@dataclass(frozen=True)
class Cell:
    """One page. ``state``: held, cached, free, or elsewhere (with another KV group of its pool); ``filled``:
    share of its slots that hold a token."""

    page: int
    state: str
    owners: tuple[int, ...] = ()
    filled: float = 0.0
    open: bool = False
    copy_of: int = 0

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
        if self.state == "elsewhere":
            return f"page {self.page}: with another KV group"
        if self.state != "held":
            return f"page {self.page}: {self.state}"
        who = ", ".join(map(str, self.owners))
        many = "sequences" if len(self.owners) > 1 else "sequence"
        copied = f", a copy of page {self.copy_of}" if self.copy_of else ""
        opened = ", open" if self.open else ""
        return f"page {self.page}: {many} {who}, {self.filled:.0%} filled{opened}{copied}"


def cells(group: GroupPages, copies: Mapping[int, int] | None = None) -> list[Cell]:
    """Pages 1 up to the last one that is held or cached, at most ``MAX_CELLS``.

    ``copies`` says of which page a page was made by copy-on-write.
    """
    copies = copies or {}
    owners: dict[int, list[int]] = {}
    filled: dict[int, float] = {}
    for number, seq in enumerate(group.sequences, 1):
        for i, page in enumerate(seq.pages):
            owners.setdefault(page, []).append(number)
            share = min(max(seq.filled / group.page_size - i, 0.0), 1.0)
            filled[page] = max(filled.get(page, 0.0), share)
    opened, cached = set(group.open), set(group.cached)
    states = {"held": set(owners), "cached": cached, "elsewhere": set(group.others)}
    last = min(max([*owners, *cached, 0]), MAX_CELLS)
    return [
        Cell(
            page,
            next((state for state, pages in states.items() if page in pages), "free"),
            tuple(owners.get(page, ())),
            filled.get(page, 0.0),
            page in opened,
            copies.get(page, 0) if page in owners else 0,
        )
        for page in range(1, last + 1)
    ]


def figure(snapshots: Sequence[PageSnapshot], theme: Theme = "auto") -> Any:
    """Cells of every KV group in rows of 32: filled slots solid, shared pages with a thick outline."""
    snapshot = snapshots[-1]
    groups = snapshot.groups
    title = f"Pages of {groups[0].page_size} tokens at engine step {snapshot.step}"
    out = figures.new(title, theme=theme)
    top, texts = 0.0, []
    hover: tuple[list[float], list[float], list[str], list[str]] = ([], [], [], [])
    for g, group in enumerate(groups):
        shown = cells(group)
        for cell in shown:
            if cell.state == "elsewhere":
                continue
            x, y = (cell.page - 1) % _COLUMNS, top + (cell.page - 1) // _COLUMNS
            _draw(out, cell, x, y)
            for values, value in zip(hover, (x + 0.5, y + 0.5, cell.label, cell.words), strict=True):
                values.append(value)  # type: ignore[arg-type]
        top += max(-(-len(shown) // _COLUMNS), 1)
        texts.append((top + 0.3, f"Group {g}: {summary(group)}" if len(groups) > 1 else summary(group)))
        top += 0.9
    out.add_scatter(
        x=hover[0], y=hover[1], text=hover[2], customdata=hover[3], mode="text", showlegend=False,
        hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    for y, text in texts:
        out.add_annotation(x=0, y=y, text=text, showarrow=False, xanchor="left", font={"size": 11})
    out.update_xaxes(visible=False, range=[0, _COLUMNS], fixedrange=True)
    out.update_yaxes(visible=False, range=[top, 0], fixedrange=True)
    out.update_layout(height=int(figures.TOP + 24 + 32 * top), margin={"l": 8, "r": 8, "b": 8})
    return out


def _draw(out: Any, cell: Cell, x: float, y: float) -> None:
    box = {"type": "rect", "x0": x + 0.06, "x1": x + 0.94}
    colour = _COLOURS["fragmentation" if cell.open else "kv_payload"]
    outline = {
        "color": colour if cell.state == "held" else _COLOURS["kv_free"],
        "width": 2.5 if len(cell.owners) > 1 else 1,
        "dash": "dash" if cell.open else "dot" if cell.state in ("free", "elsewhere") else "solid",
    }
    back = _COLOURS["kv_cached"] if cell.state == "cached" else "rgba(0,0,0,0)"
    out.add_shape(**box, y0=y + 0.06, y1=y + 0.94, line=outline, fillcolor=back)
    if cell.filled:
        low = y + 0.94 - 0.88 * cell.filled
        out.add_shape(**box, y0=low, y1=y + 0.94, line={"width": 0}, fillcolor=colour, opacity=0.45)


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
                    len(held & opened), seq.pages.count(0), len(seq.pages) * group.page_size - seq.filled,
                )
            )  # fmt: skip
    columns = (
        "sequence", "KV group", "tokens", "pages", "shared pages", "open pages", "given back", "empty slots",
    )  # fmt: skip
    notes = " ".join(
        f"Group {g}: {summary(group)}." if len(snapshot.groups) > 1 else f"{summary(group)}."
        for g, group in enumerate(snapshot.groups)
    )
    return Table.of(columns, rows, note=f"After engine step {snapshot.step} (measured). {notes}")


def summary(group: GroupPages) -> str:
    """The pool in one line."""
    held, cached, others = len(group.refs), len(group.cached), len(group.others)
    elsewhere = f"{others} with other groups, " if others else ""
    return (
        f"{held} of {group.pages} pages held, {sum(n > 1 for n in group.refs.values())} of them shared and "
        f"{len(group.open)} open; {cached} cached, {elsewhere}{group.pages - held - cached - others} free; "
        f"{group.page_size} tokens a page"
    )


def drawn(snapshot: PageSnapshot, changes: Sequence[Change] = ()) -> dict[str, Any]:
    """What the front end draws: cells and one line per KV group, the table, and what happened lately."""
    groups = []
    for number, g in enumerate(snapshot.groups):
        copies = {c.pages[1]: c.pages[0] for c in changes if c.what == "copied" and c.group == number}
        row = [
            [c.state, c.label, round(c.filled, 3), c.open, len(c.owners), c.words, bool(c.copy_of)]
            for c in cells(g, copies)
        ]
        more = max(max([*g.refs, *g.cached, 0]) - MAX_CELLS, 0)
        groups.append({"cells": row, "summary": summary(g), "more": more})
    shown = table((snapshot,))  # its note is the groups' summaries again
    rows = [[str(v) for v in row] for row in shown.rows]
    return {
        "step": snapshot.step,
        "groups": groups,
        "changes": [f"step {c.step}: {c.words}" for c in changes[-TOLD:][::-1]],
        "table": {
            "columns": list(shown.columns),
            "rows": rows,
            "note": f"After engine step {snapshot.step}, measured.",
        },
    }
