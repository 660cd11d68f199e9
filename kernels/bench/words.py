"""Numbers of a record as short text, the same in the terminal's table and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NONE = "–"


def time(seconds: float | None) -> str:
    """Seconds in a fitting unit, three digits."""
    if seconds is None:
        return NONE
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def rate(row: Mapping[str, Any]) -> str:
    """``612 TFLOP/s`` or ``3.71 TB/s``."""
    if row.get("rate") is None:
        return NONE
    digits = 4 if row["rate"] >= 1000 else 3
    return f"{row['rate']:.{digits}g} {row['rate_unit']}"


def percent(fraction: float | None) -> str:
    """A share of the ceiling."""
    return NONE if fraction is None else f"{100 * fraction:.0f}%"


def times(value: float | None) -> str:
    """``2.4x``."""
    return NONE if value is None else f"{value:.3g}x"


def marks(goal: Mapping[str, Any]) -> str:
    """``must 560, target 660, stretch 720``, and of what."""
    if goal["must"] == goal["stretch"]:
        text = f"must {goal['must']:g}"
    else:
        text = ", ".join(f"{name} {goal[name]:g}" for name in ("must", "target", "stretch"))
    return f"{text} of {goal['of']}" if goal["of"] else text


def goal(goal: Mapping[str, Any]) -> str:
    """What was reached of a goal, in words and numbers."""
    if goal["value"] is None:
        return f"not measured ({marks(goal)})"
    return f"{goal['level']} ({goal['value']:.3g}; {marks(goal)})"


def beside(timed: Mapping[str, Any]) -> str:
    """A baseline or variant: its time, and how many times faster ours is; or why it has none."""
    if "median" not in timed:
        return str(timed.get("error", "not measured"))
    text = f"{time(timed['median'])}, ours {times(timed.get('times_faster'))} as fast"
    differs = timed.get("differs")
    return text if differs is None else f"{text}, results within {differs:.1e}"


def errors(check: Mapping[str, Any]) -> str:
    """Error of each output against the same-dtype path: ``out 2.0e-03 (plain 2.9e-03)``."""
    found = []
    for name, v in check.get("outputs", {}).items():
        if "error" not in v:
            found.append(f"{name}: {v['wrong']}")
        elif v["plain"] is None:
            found.append(f"{name} {v['error']:.1e} (at most {v['allowed']:.1e})")
        else:
            found.append(f"{name} {v['error']:.1e} (plain {v['plain']:.1e})")
    found += [f"{name} {value:.3g}" for name, value in check.get("figures", {}).items()]
    return ", ".join(found)
