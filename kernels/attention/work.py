"""The work of a prefill attention call: which tiles there are, and what they cost.

The host writes a work list, one row of int32 per ``bm`` queries of one sequence, longest first, so that the
blocks of a GPU end at about the same time however ragged the batch and the causal triangle are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from workbench.kernels.spec import Cost

#: Columns of the work list: first query row, valid rows, position of the first query among the keys, first
#: KV row (or first entry of the flattened page table), keys, first and past-the-last KV tile, number of the
#: query tile counted over the whole batch.
FIELDS = 8


def work_list(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    causal: bool,
    window: int,
    bm: int,
    bn: int,
    width: int = 0,
) -> Tensor:
    """Work items int32 [n, 8]; rows that see no key at all get none.

    Tiles are ``bm`` queries by ``bn`` keys. ``window`` is the number of keys a query sees, itself included
    (0: all). ``width`` is that of the page table; 0 means that K and V are packed, sequence after sequence.
    """
    items, q_row, kv_row, block = [], 0, 0, 0
    for sequence, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        first = torch.arange(0, q_len, bm)
        rows = (q_len - first).clamp(max=bm)
        position = kv_len - q_len + first
        last = (position + rows).clamp(max=kv_len) if causal else torch.full_like(first, kv_len)
        hi = torch.div(last + bn - 1, bn, rounding_mode="floor")
        lo = torch.div((position - window + 1).clamp(min=0), bn, rounding_mode="floor") if window else 0 * hi
        base = sequence * width if width else kv_row
        fixed = [torch.full_like(first, value) for value in (base, kv_len)]
        number = block + torch.arange(len(first))
        found = torch.stack([q_row + first, rows, position, *fixed, lo, hi, number], 1)
        items.append(found[hi > lo])
        q_row, kv_row, block = q_row + q_len, kv_row + kv_len, block + len(first)
    work = torch.cat(items) if items else torch.zeros(0, FIELDS, dtype=torch.int64)
    longest_first = torch.argsort(work[:, 6] - work[:, 5], descending=True, stable=True)
    return work[longest_first].to(torch.int32)


@dataclass(frozen=True)
class Planned:
    """A work list on its device, and whether some query row is in none of its items."""

    items: Tensor
    idle_rows: bool

    def __len__(self) -> int:
        return len(self.items)


@lru_cache(maxsize=32)
def planned(
    device: torch.device,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    causal: bool,
    window: int,
    bm: int,
    bn: int,
    width: int = 0,
) -> Planned:
    """The work list of ``work_list`` on a device, made once for all layers of a step."""
    items = work_list(q_lens, kv_lens, causal=causal, window=window, bm=bm, bn=bn, width=width)
    return Planned(items.to(device), int(items[:, 1].sum()) < sum(q_lens))


def visible_pairs(q_lens: Sequence[int], kv_lens: Sequence[int], causal: bool, window: int = 0) -> int:
    """Number of (query, key) pairs that a mask leaves, per head."""
    total = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        position = torch.arange(q_len, dtype=torch.int64) + kv_len - q_len
        last = (position + 1).clamp(0, kv_len) if causal else torch.full_like(position, kv_len)
        first = (position - window + 1).clamp(min=0) if window else torch.zeros_like(position)
        total += int((last - first).clamp(min=0).sum())
    return total


def cost(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    dim: int,
    causal: bool = True,
    window: int = 0,
    itemsize: int = 2,
) -> Cost:
    """4 D FLOPs per visible pair and head; Q, K, V read once, out (2 bytes) and LSE (4) written once."""
    rows, keys = sum(q_lens), sum(kv_lens)
    moved = itemsize * dim * (rows * heads + 2 * keys * kv_heads) + (2 * dim + 4) * rows * heads
    return Cost(4 * dim * heads * visible_pairs(q_lens, kv_lens, causal, window), moved)
