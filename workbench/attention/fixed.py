"""Attention of shapes that never change: so many rows of so many sequences, over tables of one length.

For a round that is one program (``workbench.speculative.fused``): lengths are tensors that only masks are
made of, so nothing is read from the device and nothing depends on it but numbers. A sequence pays for the
whole of its table. The pinned form gives every row the bits that it has in the ragged form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.attention.softmax import weights
from workbench.attention.tile_groups import Group, KeyStep, one_thread, run_group
from workbench.attention.tiles import KEYS, ROWS
from workbench.engine.seams import AttentionShape, FixedRead


def fast_fixed(tables: Tensor, first: Tensor, rows: int, shape: AttentionShape) -> FixedRead:
    """``rows`` rows of each sequence from position ``first`` int64 [B] on; ``tables`` int64 [B, P] page ids.

    Products in the K/V dtype, softmax in at least float32, as the ragged form.
    """
    batch, heads, kv_heads, dim = len(first), shape.heads, shape.kv_heads, shape.head_dim
    page, pages = shape.page_size, tables.shape[1]
    at = torch.arange(pages * page, device=tables.device)
    own = first[:, None] + torch.arange(rows, device=tables.device)
    hidden = at > own[:, :, None]
    if shape.window is not None:
        hidden = hidden | (at <= own[:, :, None] - shape.window)
    dead = hidden.all(1).view(batch * pages, 1, page, 1)
    mine = tables.flatten()

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Pages are a batch of products: gathered K and V are then copied once, and never laid out again.
        keys = k.index_select(0, mine).view(-1, page, dim)
        values = v.index_select(0, mine).masked_fill_(dead, 0.0).view(-1, page, dim)
        folded = q.to(k.dtype).view(batch, 1, rows, kv_heads, -1, dim).transpose(2, 3)
        folded = folded.expand(-1, pages, -1, -1, -1, -1).reshape(len(keys), -1, dim)
        scores = torch.bmm(folded, keys.transpose(1, 2)).view(batch, pages, kv_heads, rows, -1, page)
        scores = scores.permute(0, 2, 3, 4, 1, 5).reshape(batch, kv_heads, rows, -1, len(at))
        w = weights(scores, hidden[:, None, :, None], 0, shape)
        w = w.view(batch, kv_heads, -1, pages, page).permute(0, 3, 1, 2, 4).reshape(len(keys), -1, page)
        out = torch.bmm(w, values).view(batch, pages, kv_heads, rows, -1, dim)
        wide = torch.promote_types(k.dtype, torch.float32)
        total = out.sum(1, dtype=wide).transpose(1, 2)
        return total.reshape(batch * rows, heads * dim).to(q.dtype)

    return read


def pinned_fixed(tables: Tensor, first: Tensor, rows: int, shape: AttentionShape) -> FixedRead:
    """The same, with the arithmetic of the pinned form: tiles of eight rows, blocks of 64 keys.

    The length of a table is a multiple of 64 slots. A tile that ends before another's sees further blocks
    wholly hidden, which change nothing.
    """
    batch, device = len(first), tables.device
    tiles = (rows + 2 * ROWS - 2) // ROWS  # they begin anywhere in the first
    places = first[:, None] // ROWS * ROWS + torch.arange(tiles * ROWS, device=device)
    row = places - first[:, None]
    real = ((row >= 0) & (row < rows)).view(-1, ROWS)
    logical = places.view(-1, ROWS)
    base = torch.arange(batch, device=device)[:, None]
    query = (base * rows + row.clamp(0, rows - 1)).flatten()
    place = (base * (tiles * ROWS) + first[:, None] % ROWS + torch.arange(rows, device=device)).flatten()
    table = tables.repeat_interleave(tiles, 0)
    steps = []
    for block in range(tables.shape[1] * shape.page_size // KEYS):
        at = block * KEYS + torch.arange(KEYS, device=device)
        hidden = ~real[:, :, None] | (at > logical[:, :, None])
        if shape.window is not None:
            hidden = hidden | (at <= logical[:, :, None] - shape.window)
        slots = table[:, at // shape.page_size] * shape.page_size + at % shape.page_size
        aligned = shape.page_size % KEYS == 0
        dead = hidden.all(1)[:, None, :, None]
        steps.append(KeyStep(slots, aligned, hidden[:, None, :, None], dead))
    group = Group(query, place, query, tuple(steps))

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        wide = torch.float64 if k.dtype == torch.float64 else torch.float32
        return run_group(group, shape, q.to(wide), k, v).index_select(0, place).to(q.dtype)

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a program cannot change the number of threads
            return run(q, k, v)
        with one_thread():
            return run(q, k, v)

    return read
