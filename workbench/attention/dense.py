"""Long chunks of the fast form: gather a sequence's pages once per layer, then tile the query rows.

Copying the pages costs little next to the products of a chunk. Query heads are folded into the row axis
(``[Hkv, rows * G, D]``), tiles are ``TILE`` rows, and keys beyond a tile's last row or behind its window are
not computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.attention.masks import fill_hidden
from workbench.attention.softmax import weights
from workbench.attention.spans import first_visible
from workbench.engine.seams import AttentionShape, AttentionSpan

TILE = 256
"""Query rows per product: 128 and 512 were both slower on two cores."""


@dataclass(frozen=True)
class Tile:
    """Rows ``a:b`` of the span against columns ``low:high``.

    ``hidden`` bool [b-a, high-edge] masks the columns from ``edge`` on; all rows see those before ``edge``.
    """

    a: int
    b: int
    low: int
    high: int
    edge: int
    hidden: Tensor


@dataclass(frozen=True)
class DensePlan:
    """A chunk: its first query row, its visible pages (int64 [nb]) and its products."""

    row: int
    pages: Tensor
    tiles: tuple[Tile, ...]
    shape: AttentionShape


def plan_dense(row: int, span: AttentionSpan, shape: AttentionShape, device: torch.device) -> DensePlan:
    """Tiles and masks of one chunk; columns are slots counted from its first visible page."""
    page, window = shape.page_size, shape.window
    first = first_visible(span, window)
    origin = first // page * page
    end = span.start + span.n_new - origin
    columns = torch.arange(end, device=device)
    hidden = torch.empty(span.n_new, end, dtype=torch.bool, device=device)
    fill_hidden(hidden, columns, [span], [origin], window)
    tiles = []
    for a in range(0, span.n_new, TILE):
        b = min(a + TILE, span.n_new)
        seen = (~hidden[a:b]).any(0).nonzero()
        low = int(seen[0]) if len(seen) else first - origin
        high = int(seen[-1]) + 1 if len(seen) else low + 1
        partly = hidden[a:b, low:high].any(0).nonzero()
        edge = low + int(partly[0]) if len(partly) else high
        tiles.append(Tile(a, b, low, high, edge, hidden[a:b, edge:high]))
    pages = torch.tensor(span.table[origin // page : (origin + end - 1) // page + 1], device=device)
    return DensePlan(row, pages, tuple(tiles), shape)


def run_dense(plan: DensePlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Write the chunk's rows of ``out`` [T, Hq, D]; ``q`` in the K/V dtype, ``k``/``v`` [N, Hkv, P, D]."""
    heads, dim = plan.shape.kv_heads, plan.shape.head_dim
    keys, values = (t.index_select(0, plan.pages).transpose(0, 1).reshape(heads, -1, dim) for t in (k, v))
    for t in plan.tiles:
        rows = slice(plan.row + t.a, plan.row + t.b)
        n = t.b - t.a
        folded = q[rows].view(n, heads, -1, dim).transpose(0, 1).reshape(heads, -1, dim)
        s = torch.bmm(folded, keys[:, t.low : t.high].transpose(1, 2)).view(heads, n, -1, t.high - t.low)
        hidden = t.hidden[None, :, None, :] if t.edge < t.high else None
        w = weights(s, hidden, t.edge - t.low, plan.shape)
        o = torch.bmm(w.view(heads, -1, t.high - t.low), values[:, t.low : t.high])
        out[rows].view(n, heads, -1, dim).copy_(o.view(heads, n, -1, dim).transpose(0, 1))
