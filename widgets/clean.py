"""Numbers that can be drawn and sent: NaN, infinities and logarithms of zero become gaps, and are counted.

JSON has no NaN; a plot with one is blank or wrong. A gap is drawn where a value is missing, and a note says
how many points were left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def series(values: Iterable[float | None], *, log: bool = False) -> tuple[list[float | None], int]:
    """``values`` with None for what cannot be shown (on a ``log`` axis also 0 and below), and their count."""
    out: list[float | None] = []
    for value in values:
        drawable = value is not None and math.isfinite(value) and not (log and value <= 0)
        out.append(float(value) if drawable and value is not None else None)
    return out, sum(v is None for v in out)


def note(left_out: int, *, log: bool = False) -> str:
    """One sentence about left-out points; empty when there are none."""
    if not left_out:
        return ""
    why = "not finite, or not positive on a log axis" if log else "not finite"
    return f"{left_out} {'point' if left_out == 1 else 'points'} left out ({why})"


def plain(value: Any) -> Any:
    """A JSON-able copy of nested mappings and sequences in which no number is NaN or infinite."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
