"""Numbers in words: sizes, and how one run compares with another.

A ratio always says of what, and is quoted only of runs that did the same work. Nothing is called faster or
smaller within two per cent: a single pair of runs on a shared machine cannot tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.records.conditions import apart, differences, same_question
from workbench.spec.events import KV_IN_USE
from workbench.spec.run import Run

_SAME = 0.02


def size(n: float) -> str:
    """Bytes in words: ``31.4 MiB``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if abs(n) < 1000:
            break
        n, unit = n / 1024, larger
    return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}" if abs(n) < 1000 else f"{n:,.0f} {unit}"


def number(value: float | None, digits: int = 3) -> str:
    """A number with ``digits`` significant digits, a dash when there is none."""
    if value is None or value != value:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def kv_in_use(memory: Mapping[str, int]) -> int:
    """Bytes of KV that live tokens occupy: payload, metadata, and what their slots leave empty."""
    return sum(memory.get(k, 0) for k in KV_IN_USE)


def delta(before: Run, after: Run, than: str = "") -> str:
    """``after`` against ``before`` in words: speed, KV memory, text. ``than`` names ``before``.

    Of runs that did different work: what differs.
    """
    why_not = apart(differences(before, after))
    if why_not:
        numbers = f"not compared{f' with {than}' if than else ''}: {why_not}"
    else:
        parts = _parts(before, after)
        numbers = ", ".join(parts) + (f" than {than}" if parts and than else "")
    text = text_agreement(before.token_ids, after.token_ids) if same_question(before, after) else ""
    return "; ".join(filter(None, (numbers, text)))


def _parts(before: Run, after: Run) -> list[str]:
    parts = []
    a, b = before.metric("decode_speed"), after.metric("decode_speed")
    if a is not None and b is not None and a.value > 0 and b.value > 0:
        parts.append(_speed(b.value / a.value))
    kv_a, kv_b = kv_in_use(before.memory), kv_in_use(after.memory)
    if kv_a > 0 and kv_b > 0:
        parts.append(_amount(kv_b / kv_a, "KV memory"))
    return parts


def text_agreement(a: Sequence[int], b: Sequence[int]) -> str:
    """Whether two outputs are the same tokens, and where they part if not."""
    same = agreeing(a, b)
    n = min(len(a), len(b))
    if same == n:
        return f"same {n} tokens" if len(a) == len(b) else f"same text for {n} tokens"
    return f"text parts at token {same + 1} of {n}"


def agreeing(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def describe(metric: Any) -> str:
    """A metric with its unit, and its spread where it was repeated."""
    text = f"{number(metric.value)} {metric.unit}".strip()
    if metric.n > 1 and metric.spread is not None:
        text += f" ({number(metric.spread[0])}–{number(metric.spread[1])})"
    return text


def _speed(ratio: float) -> str:
    if abs(ratio - 1) <= _SAME:
        return "same speed"
    return f"{ratio:.2g}× faster" if ratio > 1 else f"{1 / ratio:.2g}× slower"


def _amount(ratio: float, of: str) -> str:
    if abs(ratio - 1) <= _SAME:
        return f"same {of}"
    return f"{1 - ratio:.0%} less {of}" if ratio < 1 else f"{ratio - 1:.0%} more {of}"
