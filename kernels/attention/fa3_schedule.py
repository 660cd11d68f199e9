"""Which tile of queries a block works on, in which order, and how K and V tiles reach shared memory.

A persistent grid walks heads x rows of the work list (see ``work``) in snake order, every second wave
backwards: causal work evens out without atomics. KV tiles of an item go from the last to the first: the
ragged and the diagonal tile come first, and FP8 probabilities cannot underflow behind an attention sink that
appears late (arXiv 2606.06521).
The producer is one warp that only issues TMA copies; ``kernels.attention.fa3_fwd`` explains the barriers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from workbench.kernels.attention.gluon_names import tma_load


@gluon.jit
def barriers(ST: gl.constexpr):
    """Initialised barriers: Q, K and V full and empty, and whose turn it is; see `fa3_kernel` for counts."""
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(ST):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    return (q_full, q_empty, k_full, k_empty, v_full, v_empty), turn


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
    q_desc, k_desc, v_desc, smem, bars, work_ptr, pages_ptr, sizes,
    BN: gl.constexpr, ST: gl.constexpr, PAGE: gl.constexpr, VT: gl.constexpr,
):  # fmt: skip
    """The producer warp: K, then both Q halves, then V of the first tile; K and V of all others.

    With ``VT`` (the head size) pages hold V transposed, ``[D, PAGE]`` where K has ``[PAGE, D]``.
    """
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
                tma_load(k_desc, [row, kv_head * kv_cols], k_full.index(slot), k_smem.index(slot))
                if step == 0:
                    for c in gl.static_range(2):
                        mbarrier.wait(q_empty.index(c), t & 1 ^ 1)
                        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
                        tma_load(q_desc, [q_row + 64 * c, head * q_cols], q_full.index(c), q_smem.index(c))
                mbarrier.wait(v_empty.index(slot), phase ^ 1)
                mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
                if VT > 0:  # noqa: SIM108 — decided while compiling
                    v_at = [row // PAGE * VT, row % PAGE]
                else:
                    v_at = [row, kv_head * kv_cols]
                tma_load(v_desc, v_at, v_full.index(slot), v_smem.index(slot))
                n += 1
            t += 1
