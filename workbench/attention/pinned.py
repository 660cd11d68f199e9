"""Pinned attention: a row's bits depend on its sequence only, never on batch, chunks, pages or drafting.

Online softmax over blocks of 64 logical slots in order (Dao et al. 2022, alg. 1), every product of the
fixed shape ``[Hkv, 8 * G, 64]``: see :mod:`workbench.attention.tiles` for where rows and keys are put.
A block that a row may not see is an exact no-op for it (factor 1, weights 0), so tiles of different lengths
can share a call. Calls run on one thread, because MKL's products change their low bits with the thread
count, and stay below torch's parallel grain. Computes in float64 for float64 K/V, else in float32 (16-bit
K/V are widened block by block).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.attention.fixed import pinned_fixed
from workbench.attention.spans import Bools, check_shape, check_span
from workbench.attention.tile_groups import Group, KeyStep, one_thread, run_group
from workbench.attention.tiles import KEYS, ROWS, QueryTile, tiles_of
from workbench.engine.seams import AttentionShape, AttentionSpan, FixedRead

GRAIN = 32768
"""torch splits element-wise loops over threads from this many elements (``at::internal::GRAIN_SIZE``)."""


@dataclass(frozen=True)
class PinnedPlan:
    """All groups of a step."""

    shape: AttentionShape
    groups: tuple[Group, ...]


def _step(tiles: Sequence[QueryTile], j: int, page_size: int, device: torch.device) -> KeyStep:
    """Block ``j`` of each tile; a tile that has ended repeats its last block, wholly hidden."""
    slots = np.stack([t.slots[min(j, len(t.slots) - 1)] for t in tiles])
    hidden = np.stack([t.hidden[j] if j < len(t.hidden) else np.ones_like(t.hidden[0]) for t in tiles])
    dead: Bools = np.all(hidden, axis=1)
    # A dead slot may name any row: it is hidden from all, so order is judged on the others.
    in_order = slots[:, :1] // KEYS * KEYS + np.arange(KEYS)
    aligned = page_size % KEYS == 0 and bool(((slots == in_order) | dead).all())
    hide = torch.from_numpy(hidden[:, None, :, None]).to(device) if hidden.any() else None
    drop = torch.from_numpy(dead[:, None, :, None]).to(device) if dead.any() else None
    return KeyStep(torch.from_numpy(slots).to(device), aligned, hide, drop)


def _group(tiles: Sequence[QueryTile], page_size: int, device: torch.device) -> Group:
    rows = np.concatenate([t.rows for t in tiles])
    first = np.repeat([t.rows[t.rows >= 0][0] for t in tiles], ROWS)
    place = np.flatnonzero(rows >= 0)
    query, at, of = (
        torch.from_numpy(a).to(device) for a in (np.where(rows < 0, first, rows), place, rows[place])
    )
    longest = max(len(t.slots) for t in tiles)
    return Group(query, at, of, tuple(_step(tiles, j, page_size, device) for j in range(longest)))


class PinnedAttention:
    """The pinned form behind the attention seam. Keeps nothing between calls."""

    name = "torch-pinned"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    def prepare(
        self, spans: Sequence[AttentionSpan], shape: AttentionShape, previous: Any = None
    ) -> PinnedPlan:
        """Tiles of all spans, grouped by length; ``previous`` is not needed.

        Raises :class:`WrongShape` or :class:`InvariantError` for spans or shapes that contradict themselves.
        """
        check_shape(shape)
        tiles: list[QueryTile] = []
        row = 0
        for i, span in enumerate(spans):
            check_span(i, span, shape.page_size)
            tiles += tiles_of(row, span, shape)
            row += span.n_new
        tiles.sort(key=lambda t: -len(t.slots))
        per_tile = ROWS * shape.heads * max(KEYS, shape.head_dim)
        kv_tile = shape.kv_heads * KEYS * shape.head_dim
        size = max(1, (GRAIN - 1) // max(per_tile, kv_tile))
        chunks = [tiles[i : i + size] for i in range(0, len(tiles), size)]
        return PinnedPlan(shape, tuple(_group(c, shape.page_size, self._device) for c in chunks))

    def run(self, plan: PinnedPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[T, Hq*D]`` in ``q``'s dtype. Shapes as in the seam; nothing given is changed."""
        wide = torch.float64 if k.dtype == torch.float64 else torch.float32
        x = q.to(wide)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device).flatten(1)
        with one_thread():
            for group in plan.groups:
                result = run_group(group, plan.shape, x, k, v).index_select(0, group.place)
                out.index_copy_(0, group.rows, result.to(q.dtype))
        return out

    def fixed(self, tables: Tensor, first: Tensor, rows: int, shape: AttentionShape) -> FixedRead:
        """See :class:`workbench.engine.seams.FixedAttention`."""
        return pinned_fixed(tables, first, rows, shape)
