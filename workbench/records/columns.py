"""Rows of like records as columns: what keeps the steps of a run small in JSON.

A column is one of ``{"all": v}`` (every row has the same value), ``{"keys": {name: column}}`` (rows are
objects with the same keys), ``{"lengths": column, "items": column}`` (rows are lists of objects, laid
end to end) and ``{"each": [...]}`` (anything else). :func:`expand` is the exact inverse of :func:`shrink`
on plain JSON data, and refuses columns that would unfold to more rows than allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.spec.errors import RecordError

MAX_ROWS = 1_000_000
MAX_VALUES = 20_000_000


def shrink(rows: Sequence[Any]) -> dict[str, Any]:
    """The column form of ``rows``."""
    if not rows:
        return {"each": []}
    first = rows[0]
    if all(_same(r, first) for r in rows):
        return {"all": first}
    if isinstance(first, Mapping) and first:
        names = list(first)
        if all(isinstance(r, Mapping) and list(r) == names for r in rows):
            return {"keys": {name: shrink([r[name] for r in rows]) for name in names}}
    if all(isinstance(r, list) and all(isinstance(i, Mapping) for i in r) for r in rows):
        return {"lengths": shrink([len(r) for r in rows]), "items": shrink([i for r in rows for i in r])}
    return {"each": list(rows)}


def expand(column: Any, n: int) -> list[Any]:
    """``n`` rows from their column form; raises :class:`RecordError` when it is malformed or too large."""
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MAX_ROWS:
        raise RecordError(f"A run cannot have {n!r} rows; at most {MAX_ROWS:,} are read.")
    match column:
        case {"all": value}:
            if n * _size(value) > MAX_VALUES:
                raise RecordError(f"A run's rows would unfold to more than {MAX_VALUES:,} values.")
            return [_copy(value) for _ in range(n)]
        case {"keys": {**columns}} if columns:
            parts = {str(name): expand(c, n) for name, c in columns.items()}
            return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
        case {"lengths": lengths, "items": items}:
            counts = expand(lengths, n)
            if not all(isinstance(k, int) and 0 <= k <= MAX_ROWS for k in counts):
                raise RecordError("A run's rows have impossible lengths.")
            flat = iter(expand(items, sum(counts)))
            return [[next(flat) for _ in range(k)] for k in counts]
        case {"each": list(values)} if len(values) == n:
            return values
    raise RecordError("A run's rows are not in a form this version reads.", hint="Export the run again.")


def _same(a: Any, b: Any) -> bool:
    # 1, 1.0 and True are equal to Python and different in JSON.
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _size(value: Any) -> int:
    """Values in ``value``, containers included."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return 1 + sum(_size(v) for v in parts)


def _copy(value: Any) -> Any:
    """A value of its own for every row; scalars need none."""
    if isinstance(value, Mapping):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value
