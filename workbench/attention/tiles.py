"""Query tiles of the pinned form: where each row sits, and which keys it meets in which order.

A row's bits may depend on its logical index only. So a row with logical index ``l`` always sits in place
``l % 8`` of a tile of rows with the same ``l // 8``, and meets the keys of its own *logical* sequence in
order: committed slots, then its ancestors by depth. A draft tree is therefore cut into root-to-leaf
*paths*. Each row is computed on the first path that holds it; keys of a path are gathered so that node
``d`` of the path lies where token ``d`` of a chain would lie. Keys are met in blocks of 64 logical slots,
whatever the page size, so that paging is no part of the arithmetic either.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from workbench.attention.spans import Bools, Ints, shift, slot_rows
from workbench.engine.seams import AttentionShape, AttentionSpan

ROWS = 8
"""Rows of a tile: from eight rows on, matrix products treat every row count alike."""
KEYS = 64
"""Logical slots of a key block."""


@dataclass(frozen=True)
class QueryTile:
    """Up to eight rows of one path: ``rows`` int64 [8] query rows of the step (-1: padding), ``slots``
    int64 [nb, 64] flat pool slots in logical order, ``hidden`` bool [nb, 8, 64]."""

    rows: Ints
    slots: Ints
    hidden: Bools


def paths(span: AttentionSpan) -> list[tuple[list[int], list[int]]]:
    """Per leaf: its path from the root, and the depths at which the path is the first to hold the row."""
    parents = list(range(-1, span.n_new - 1)) if span.parents is None else list(span.parents)
    inner = set(parents)
    held: set[int] = set()
    out = []
    for leaf in range(span.n_new):
        if leaf in inner:
            continue
        path = [leaf]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        path.reverse()
        out.append((path, [d for d, node in enumerate(path) if node not in held]))
        held.update(path)
    return out


def tiles_of(row: int, span: AttentionSpan, shape: AttentionShape) -> list[QueryTile]:
    """All tiles of a span whose query rows begin at ``row``."""
    page, window, start = shape.page_size, shape.window, span.start
    committed = np.arange(start, dtype=np.int64)
    positions = np.asarray(span.positions, dtype=np.int64)
    out = []
    for path, own in paths(span):
        nodes = np.array(path, dtype=np.int64)
        slot = np.concatenate([committed, start + nodes])
        at = np.concatenate([committed + shift(span), positions[nodes]])
        for block in sorted({(start + d) // ROWS for d in own}):
            depths = np.array([d for d in own if (start + d) // ROWS == block], dtype=np.int64)
            logical = start + depths
            low = 0
            if window is not None:
                near = np.flatnonzero(at > at[logical].min() - window)
                low = min(int(near[0]) if len(near) else int(logical[0]), int(logical[0])) // KEYS
            order = np.arange(low * KEYS, (int(logical[-1]) // KEYS + 1) * KEYS)
            exists = np.minimum(order, len(slot) - 1)
            rows = np.full(ROWS, -1, dtype=np.int64)
            rows[logical % ROWS] = row + nodes[depths]
            hidden = np.ones((ROWS, len(order)), dtype=np.bool_)
            hidden[logical % ROWS] = order > logical[:, None]
            if window is not None:
                hidden[logical % ROWS] |= at[exists] <= at[logical][:, None] - window
            flat = slot_rows(span.table, page, slot[exists]).reshape(-1, KEYS)
            out.append(QueryTile(rows, flat, hidden.reshape(ROWS, -1, KEYS).swapaxes(0, 1)))
    return out
