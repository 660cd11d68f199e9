"""Numbers as people read them: at most four digits, a unit, a spread."""

from __future__ import annotations

import math

from workbench.spec.run import Metric

_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def number(value: float, unit: str = "") -> str:
    """``value`` with at most four digits; bytes in binary units."""
    if not math.isfinite(value):
        return str(value)
    if unit == "B":
        for name, size in _BYTES:
            if abs(value) >= size:
                return f"{value / size:.4g} {name}"
        return f"{value:.0f} B"
    if value == int(value) and abs(value) < 1e7:
        return f"{int(value):,}"
    text = f"{value:.4g}"
    return f"{value:,.0f}" if "e+" in text else text


def quantity(metric: Metric) -> str:
    """Value and unit."""
    text = number(metric.value, metric.unit)
    return text if metric.unit in ("", "B") else f"{text} {metric.unit}"


def spread(metric: Metric) -> str:
    """`` (low–high, n=…)`` of a repeated measurement, else nothing."""
    if metric.spread is None or metric.n < 2:
        return ""
    low, high = (number(v, metric.unit) for v in metric.spread)
    return f" ({low}–{high}, n={metric.n})"
