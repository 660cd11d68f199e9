"""Which tile of queries a block works on, in which order, and how K and V tiles reach shared memory.

The host writes a work list: one row of int32 per 128 queries of one sequence, longest first. A persistent
grid walks heads x rows in snake order (every second wave backwards): causal work evens out without atomics.
KV tiles of an item go from the last to the first: the ragged and the diagonal tile come first, and FP8
probabilities cannot underflow behind an attention sink that appears late (arXiv 2606.06521).
The producer is one warp that only issues TMA copies; ``kernels.attention.fa3_fwd`` explains the barriers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

#: Columns of the work list: first query row, valid rows, position of the first query among the keys, first
#: KV row (or first entry of the flattened page table), keys, first and past-the-last KV tile, unused.
FIELDS = 8
BM = 128


def work_list(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    causal: bool,
    window: int,
    bn: int,
    pages_per_sequence: int = 0,
) -> Tensor:
    """Work items int32 [n, 8]; rows that see no key at all get none.

    ``window`` is the number of keys a query sees, itself included (0: all). ``pages_per_sequence`` is the
    width of the page table; 0 means that K and V are packed one sequence after the other.
    """
    items, q_row, kv_row = [], 0, 0
    for sequence, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        first = torch.arange(0, q_len, BM)
        rows = (q_len - first).clamp(max=BM)
        position = kv_len - q_len + first
        last = (position + rows).clamp(max=kv_len) if causal else torch.full_like(first, kv_len)
        hi = torch.div(last + bn - 1, bn, rounding_mode="floor")
        lo = torch.div((position - window + 1).clamp(min=0), bn, rounding_mode="floor") if window else 0 * hi
        base = sequence * pages_per_sequence if pages_per_sequence else kv_row
        fixed = [torch.full_like(first, value) for value in (base, kv_len)]
        found = torch.stack([q_row + first, rows, position, *fixed, lo, hi, 0 * hi], 1)
        items.append(found[hi > lo])
        q_row, kv_row = q_row + q_len, kv_row + kv_len
    work = torch.cat(items) if items else torch.zeros(0, FIELDS, dtype=torch.int64)
    longest_first = torch.argsort(work[:, 6] - work[:, 5], descending=True, stable=True)
    return work[longest_first].to(torch.int32)


@gluon.jit
def tile_of(wave):
    """Number of the tile of this block in a wave; forwards in even waves, backwards in odd ones."""
    here = gl.program_id(0)
    width = gl.num_programs(0)
    return wave * width + gl.where((wave & 1) == 0, here, width - 1 - here)


@gluon.jit
def kv_row_of(j, kv_base, pages_ptr, page_rows, BN: gl.constexpr, PAGE: gl.constexpr):
    """Row of KV tile ``j`` in the descriptor: packed, or through the page table."""
    if PAGE == 0:
        return kv_base + j * BN
    else:
        page = gl.load(pages_ptr + kv_base + j * BN // PAGE)
        return page * page_rows + j * BN % PAGE


@gluon.jit
def produce(
    q_desc,
    k_desc,
    v_desc,
    smem,
    bars,
    work_ptr,
    pages_ptr,
    sizes,
    BN: gl.constexpr,
    ST: gl.constexpr,
    PAGE: gl.constexpr,
):
    """The producer warp: K, then both Q halves, then V of the first tile; K and V of all others."""
    q_smem, k_smem, v_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    n_items, n_tiles, group, q_rows, q_cols, kv_rows, kv_cols, page_rows = sizes
    n = 0
    t = 0
    for wave in range(gl.cdiv(n_tiles, gl.num_programs(0))):
        tile = tile_of(wave)
        if tile < n_tiles:
            head = tile // n_items
            kv_head = head // group
            item = work_ptr + tile % n_items * 8
            q_row = gl.load(item) + head * q_rows
            kv_base = gl.load(item + 3)
            first = gl.load(item + 5)
            tiles = gl.load(item + 6) - first
            for step in range(tiles):
                j = first + tiles - 1 - step
                row = kv_row_of(j, kv_base, pages_ptr, page_rows, BN, PAGE) + kv_head * kv_rows
                slot = n % ST
                phase = n // ST & 1
                # A fresh barrier passes parity 1, so the first round of the ring does not wait.
                mbarrier.wait(k_empty.index(slot), phase ^ 1)
                mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_desc, [row, kv_head * kv_cols], k_full.index(slot), k_smem.index(slot)
                )
                if step == 0:
                    for c in gl.static_range(2):
                        mbarrier.wait(q_empty.index(c), t & 1 ^ 1)
                        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
                        tma.async_copy_global_to_shared(
                            q_desc, [q_row + 64 * c, head * q_cols], q_full.index(c), q_smem.index(c)
                        )
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
                mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_desc, [row, kv_head * kv_cols], v_full.index(slot), v_smem.index(slot)
                )
                n += 1
            t += 1
