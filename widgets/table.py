"""A small table that reads well as text, as HTML, and as data: the twin of every chart."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Table:
    """``columns`` and ``rows`` of plain values; ``caption`` and ``note`` are one sentence each."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    caption: str = ""
    note: str = ""

    @classmethod
    def of(
        cls, columns: Iterable[str], rows: Iterable[Sequence[Any]], caption: str = "", note: str = ""
    ) -> Table:
        """Build a table from any iterables."""
        return cls(tuple(columns), tuple(tuple(r) for r in rows), caption, note)

    def to_dicts(self) -> list[dict[str, Any]]:
        """One mapping per row, for a data frame or a file."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_text(self) -> str:
        """Aligned plain text; numbers to the right."""
        cells = [list(self.columns), *([_text(v) for v in row] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self.columns))]
        right = [self.rows and all(_numeric(row[i]) for row in self.rows) for i in range(len(self.columns))]
        lines = [
            "  ".join(
                c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in cells
        ]
        lines.insert(1, "  ".join("─" * w for w in widths))
        return "\n".join(
            [*([self.caption] if self.caption else []), *lines, *([self.note] if self.note else [])]
        )

    def to_html(self) -> str:
        """A table in the notebook's style, words to the left, quantities to the right; values are escaped."""
        sides = [
            "right" if self.rows and all(_quantity(row[i]) for row in self.rows) else "left"
            for i in range(len(self.columns))
        ]
        heads = zip(self.columns, sides, strict=True)
        head = "".join(f'<th scope="col" style="text-align:{s}">{html.escape(c)}</th>' for c, s in heads)
        body = "".join(
            "<tr>" + "".join(_cell(v, s) for v, s in zip(row, sides, strict=True)) + "</tr>"
            for row in self.rows
        )
        caption = (
            f'<caption style="text-align:left">{html.escape(self.caption)}</caption>' if self.caption else ""
        )
        note = f"<p><small>{html.escape(self.note)}</small></p>" if self.note else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Mapping[str, str]:
        return {"text/plain": self.to_text(), "text/html": self.to_html()}

    def __str__(self) -> str:
        return self.to_text()

    def __len__(self) -> int:
        return len(self.rows)


def _cell(value: Any, side: str) -> str:
    digits = ";font-variant-numeric:tabular-nums" if side == "right" else ""
    return f'<td style="text-align:{side}{digits}">{html.escape(_text(value))}</td>'


def _quantity(value: Any) -> bool:
    """A number, or text that begins with one (``3.2 MiB``), or a cell with nothing in it."""
    return _numeric(value) or re.match(r"[-−+±≥≤<>=]*\s*\d|–?$", _text(value)) is not None


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return "–" if value != value else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
