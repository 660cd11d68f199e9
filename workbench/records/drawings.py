"""Small pictures as SVG text: stacked bars and columns. Each stands beside the table that says the same.

Colours are CSS variables, so that one picture serves light and dark pages; a ``title`` gives every shape its
words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 1000
MAX_COLUMNS = 250


def stacked_bar(parts: Mapping[str, float], label: Mapping[str, str], title: str, height: int = 28) -> str:
    """One horizontal bar of ``parts`` (name → amount); nothing is drawn for amounts of 0."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    x, shapes = 0.0, []
    for name, value in parts.items():
        width = WIDTH * value / total
        if width > 0:
            words = f"{label.get(name, name)} ({value / total:.1%})"
            shapes.append(_rect(x, 0, width, height, name, words))
        x += width
    return _svg(height, title, shapes)


def stacked_columns(rows: Sequence[Mapping[str, float]], names: Sequence[str], title: str, unit: str) -> str:
    """One column per row, parts on top of each other; a long series is averaged to :data:`MAX_COLUMNS`."""
    rows, per = _bins(rows, names)
    highest = max((sum(r.values()) for r in rows), default=0.0)
    if highest <= 0:
        return ""
    height, width, shapes = 120, WIDTH / len(rows), []
    for i, row in enumerate(rows):
        y = float(height)
        for name in names:
            h = (height - 16) * row.get(name, 0.0) / highest
            if h > 0.05:
                y -= h
                words = f"{_where(i, per)}: {name} {row[name]:.3g} {unit}"
                shapes.append(_rect(i * width, y, max(width - 0.5, 0.5), h, name, words))
    top = f'<text x="0" y="11">{escape(f"{highest:.3g} {unit}")}</text>'
    return _svg(height, title, [*shapes, top])


def columns(values: Sequence[float], labels: Sequence[str], title: str, highest: float = 1.0) -> str:
    """Columns with their labels below, on a scale from 0 to ``highest``."""
    if not values or highest <= 0:
        return ""
    height, width, shapes = 120, min(WIDTH / len(values), 96), []
    for i, (value, label) in enumerate(zip(values, labels, strict=True)):
        h = (height - 34) * min(max(value if math.isfinite(value) else 0.0, 0.0) / highest, 1.0)
        shapes.append(_rect(i * width, height - 18 - h, width * 0.8, h, "teal", f"{label}: {value:.3g}"))
        middle = i * width + width * 0.4
        for y, text in ((height - 4, label), (height - 22 - h, f"{value:.2g}")):
            shapes.append(f'<text x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{escape(text)}</text>')
    return _svg(height, title, shapes)


def _bins(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> tuple[list[dict[str, float]], int]:
    per = max(1, -(-len(rows) // MAX_COLUMNS))
    groups = [rows[i : i + per] for i in range(0, len(rows), per)]
    return [{n: sum(r.get(n, 0.0) for r in g) / len(g) for n in names} for g in groups], per


def _where(i: int, per: int) -> str:
    return f"step {i + 1}" if per == 1 else f"steps {i * per + 1} to {(i + 1) * per}, mean"


def _rect(x: float, y: float, width: float, height: float, colour: str, words: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" '
        f'style="fill:var(--{escape(colour, quote=True)})"><title>{escape(words)}</title></rect>'
    )


def _svg(height: int, title: str, shapes: Sequence[str]) -> str:
    name = escape(title, quote=True)
    body = "".join(shapes)
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{name}">{body}</svg>'
