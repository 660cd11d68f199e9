"""What a span means: which rows descend from which, and where each row stands in logical order.

The *logical index* of a row is its number of visible predecessors without a window: committed
slots first, then its own ancestors in depth order. For a chain it is the slot number; in a draft
tree siblings share one. Slots are numbers within a sequence; the slot of row ``i`` is ``start + i``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from workbench.engine.seams import AttentionShape, AttentionSpan
from workbench.spec.errors import InvariantError, WrongShape

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


def check_shape(shape: AttentionShape) -> None:
    """Raise :class:`WrongShape` when the heads do not divide into groups or a size is not positive."""
    if min(shape.heads, shape.kv_heads, shape.head_dim, shape.page_size) < 1:
        raise WrongShape(
            f"Attention sizes must be positive: {shape}.", hint="Correct the model's configuration."
        )
    if shape.heads % shape.kv_heads:
        raise WrongShape(
            f"{shape.heads} query heads cannot be shared evenly by {shape.kv_heads} KV heads.",
            hint="The number of query heads must be a multiple of the number of KV heads.",
        )


def check_span(index: int, span: AttentionSpan, page_size: int) -> None:
    """Raise :class:`InvariantError` when span ``index`` contradicts itself or its table is too short."""
    where = f"Attention span {index}"
    if span.n_new < 0 or span.start < 0 or len(span.positions) != span.n_new:
        raise InvariantError(
            f"{where} has {span.n_new} rows, {len(span.positions)} positions and starts at {span.start}.",
            hint="Give one position per new row and counts that are not negative.",
        )
    if len(span.table) * page_size < span.start + span.n_new:
        raise InvariantError(
            f"{where} needs {span.start + span.n_new} slots, over {len(span.table)} pages of {page_size}.",
            hint="Allocate the pages of all new rows before the step.",
        )
    if span.parents is not None:
        if len(span.parents) != span.n_new:
            raise InvariantError(f"{where} has {len(span.parents)} parents for {span.n_new} rows.")
        for i, p in enumerate(span.parents):
            if not -1 <= p < i:
                raise InvariantError(
                    f"{where}: row {i} has parent {p}.", hint="Parents come before children; -1 is the root."
                )


def is_chain(parents: Sequence[int] | None) -> bool:
    """True when every row continues the one before it."""
    return parents is None or all(p == i - 1 for i, p in enumerate(parents))


def ancestors(parents: Sequence[int] | None, n: int) -> Bools:
    """Boolean ``[n, n]``: row ``i`` descends from (or is) row ``j``."""
    if parents is None:
        return np.tri(n, dtype=np.bool_)
    out = np.zeros((n, n), dtype=np.bool_)
    for i, p in enumerate(parents):
        if p >= 0:
            out[i] = out[p]
        out[i, i] = True
    return out


def shift(span: AttentionSpan) -> int:
    """Position minus slot number of the committed slots, taken to lie right before the span's first row."""
    return span.positions[0] - span.start if span.n_new else 0


def first_visible(span: AttentionSpan, window: int | None) -> int:
    """The lowest slot that any row of the span may see; committed slots below it are out of every window."""
    if window is None or not span.n_new:
        return 0
    return min(max(0, min(span.positions) - shift(span) - window + 1), span.start)


def slot_rows(table: ArrayLike, page_size: int, slots: ArrayLike) -> Ints:
    """Flat pool slots (``page * P + offset``) of a sequence's ``slots``.

    Always 64-bit: page ids may arrive in 32 bits, and page times size passes 2**31 in large pools.
    """
    number = np.asarray(slots, dtype=np.int64)
    pages = np.asarray(table, dtype=np.int64)
    out: Ints = pages[number // page_size] * np.int64(page_size) + number % page_size
    return out
