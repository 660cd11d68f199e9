"""Long chunks of the fast form: gather a sequence's pages once per layer, then tile the query rows.

Copying the pages costs little next to the products of a chunk. Query heads are folded into the row axis
(``[Hkv, rows * G, D]``), tiles are ``TILE`` rows, and keys beyond a tile's last row or behind its window are
not computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.attention.masks import fill_hidden, plain
from workbench.attention.softmax import weights
from workbench.attention.spans import first_visible
from workbench.engine.seams import AttentionShape, AttentionSpan

TILE = 128
"""Query rows per product: what lies above the diagonal is computed in vain, smaller products are slower."""


@dataclass(frozen=True)
class Tile:
    """Rows ``a:b`` of the span against columns ``low:high``.

    ``bias`` bfloat16 [1, b-a, 1, high-edge] hides columns from ``edge`` on: 0 or -inf, exact in any dtype.
    All rows see the columns before ``edge``.
    """

    a: int
    b: int
    low: int
    high: int
    edge: int
    bias: Tensor


@dataclass(frozen=True)
class DensePlan:
    """A chunk: its first query row, its visible pages (int64 [nb]) and its products."""

    row: int
    pages: Tensor
    tiles: tuple[Tile, ...]
    shape: AttentionShape


def plan_dense(row: int, span: AttentionSpan, shape: AttentionShape, device: torch.device) -> DensePlan:
    """Tiles and masks of one chunk; columns are slots counted from its first visible page."""
    page = shape.page_size
    first = first_visible(span, shape.window)
    origin = first // page * page
    end = span.start + span.n_new - origin
    if shape.window is None and plain(span, None):
        tiles = _causal(span, origin, device)
    else:
        tiles = _general(span, origin, end, first - origin, shape.window, device)
    pages = torch.tensor(span.table[origin // page : (origin + end - 1) // page + 1], device=device)
    return DensePlan(row, pages, tuple(tiles), shape)


def _causal(span: AttentionSpan, origin: int, device: torch.device) -> list[Tile]:
    """A chain without a window: only the square on the diagonal is masked, the same for every tile."""
    rows = min(TILE, span.n_new)
    triangle = torch.full((rows, rows), float("-inf"), dtype=torch.bfloat16, device=device).triu_()
    tiles = []
    for a in range(0, span.n_new, TILE):
        b = min(a + TILE, span.n_new)
        high = span.start + b - origin
        bias = triangle[: b - a, : b - a - 1]
        tiles.append(Tile(a, b, 0, high, high - bias.shape[1], bias[None, :, None]))
    return tiles


def _general(
    span: AttentionSpan,
    origin: int,
    end: int,
    first: int,
    window: int | None,
    device: torch.device,
) -> list[Tile]:
    """Windows and draft trees: tiles cut from the whole mask."""
    columns = torch.arange(end, device=device)
    hidden = torch.empty(span.n_new, end, dtype=torch.bool, device=device)
    fill_hidden(hidden, columns, [span], [origin], window)
    tiles = []
    for a in range(0, span.n_new, TILE):
        b = min(a + TILE, span.n_new)
        seen = (~hidden[a:b]).any(0).nonzero()
        low = int(seen[0]) if len(seen) else first
        high = int(seen[-1]) + 1 if len(seen) else low + 1
        partly = hidden[a:b, low:high].any(0).nonzero()
        edge = low + int(partly[0]) if len(partly) else high
        cut = hidden[a:b, edge:high]
        bias = torch.zeros(cut.shape, dtype=torch.bfloat16, device=device).masked_fill_(cut, float("-inf"))
        tiles.append(Tile(a, b, low, high, edge, bias[None, :, None]))
    return tiles


def run_dense(plan: DensePlan, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Write the chunk's rows of ``out`` [T, Hq, D]; ``q`` in the K/V dtype, ``k``/``v`` [N, Hkv, P, D]."""
    heads, dim = plan.shape.kv_heads, plan.shape.head_dim
    keys, values = (t.index_select(0, plan.pages).transpose(0, 1).reshape(heads, -1, dim) for t in (k, v))
    for t in plan.tiles:
        rows = slice(plan.row + t.a, plan.row + t.b)
        n = t.b - t.a
        folded = q[rows].view(n, heads, -1, dim).transpose(0, 1).reshape(heads, -1, dim)
        s = torch.bmm(folded, keys[:, t.low : t.high].transpose(1, 2)).view(heads, n, -1, t.high - t.low)
        w = weights(s, t.bias, t.edge - t.low, plan.shape)
        o = torch.bmm(w.view(heads, -1, t.high - t.low), values[:, t.low : t.high])
        out[rows].view(n, heads, -1, dim).copy_(o.view(heads, n, -1, dim).transpose(0, 1))
