"""The FlashAttention-3 forward kernel for Hopper: one producer warp, two consumer warpgroups, all in Gluon.

Barriers (count): ``q_full`` (1 + bytes), ``q_empty`` (1) per consumer; rings of ST slots with ``k_full``,
``v_full`` (1 + bytes) and ``k_empty``, ``v_empty`` (2: both consumers); ``turn`` (1) per consumer: ping-pong.
A consumer waits for its turn, issues Q K(j) and P V(j+1), hands the turn over, and does softmax(j) while its
own P V and the other consumer's products run: the tensor cores always have the other warpgroup's work.
Waiting for the next K tile stands *between* softmax and the wait for P V: it must happen anyway, and its
retry loop ends a basic block, without which ptxas sinks the exponentials below the P V wait and the overlap
is gone without a word (EARLY_WAIT=False shows it).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from workbench.kernels.attention.fa3_parts import FLOOR, capped, clean_tail, finish, masked, write_out
from workbench.kernels.attention.fa3_schedule import barriers, produce, tile_of

#: Run-time sizes that change from call to call: no compile of their own for 1 or a multiple of 16.
SIZES = (
    *("n_items", "n_tiles", "group", "q_rows", "q_cols", "kv_rows", "kv_cols"),
    *("page_rows", "lse_row", "window"),
)


@gluon.jit
def consume(
    c: gl.constexpr, o_desc, o_ptr, lse_ptr, smem, bars, turn, work_ptr, sizes, scale, cap,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, HD: gl.constexpr, BN: gl.constexpr,
    ST: gl.constexpr, PINGPONG: gl.constexpr, EARLY_WAIT: gl.constexpr,
):  # fmt: skip
    """Consumer ``c``: rows ``64 c .. 64 c + 64`` of every tile of this block."""
    q_smem, k_smem, v_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    n_items, n_tiles, o_row, lse_row, window = sizes
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HD, 16])
    row_s: gl.constexpr = gl.SliceLayout(1, scores)
    row_o: gl.constexpr = gl.SliceLayout(1, output)
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    q_tile = q_smem.index(c)
    dtype: gl.constexpr = q_smem.dtype
    zero = gl.zeros([64, BN], gl.float32, scores)
    rows = gl.arange(0, 64, layout=row_s)
    n = 0  # KV tiles seen so far: slot and phase of the rings, and whose turn it is
    t = 0
    for wave in range(gl.cdiv(n_tiles, gl.num_programs(0))):
        tile = tile_of(wave)
        if tile < n_tiles:
            item = work_ptr + tile % n_items * 8
            pos = gl.load(item + 2) + 64 * c
            kv_len = gl.load(item + 4)
            last = gl.load(item + 6) - 1
            tiles = last + 1 - gl.load(item + 5)
            # Tiles from `right` on cross the diagonal or the end; those before `left` the window's edge.
            right = kv_len // BN
            left = 0
            if CAUSAL:
                right = gl.minimum(right, (pos + 1) // BN)
            if WINDOW:
                left = (pos + 64 - window + BN - 1) // BN

            # The last KV tile: nothing to overlap with yet. It alone can be ragged.
            slot = n % ST
            phase = n // ST & 1
            mbarrier.wait(q_full.index(c), t & 1)
            mbarrier.wait(k_full.index(slot), phase)
            if PINGPONG:
                mbarrier.wait(turn.index(c), n + 1 + c & 1)
            s = warpgroup_mma(q_tile, k_smem.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            if PINGPONG:
                mbarrier.arrive(turn.index(1 - c), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot), count=1)
            s, factor = capped(s, scale, cap, SOFTCAP)
            s = masked(s, last * BN, pos + rows, kv_len, window, CAUSAL, WINDOW, BN, scores)
            m = gl.maximum(gl.max(s, axis=1), FLOOR)
            p = gl.exp2(s * factor - (m * factor)[:, None])
            total = gl.sum(p, axis=1)
            p = gl.convert_layout(p.to(dtype), operand)
            o = gl.zeros([64, HD], gl.float32, output)
            mbarrier.wait(v_full.index(slot), phase)
            if kv_len < (last + 1) * BN:
                clean_tail(v_smem.index(slot), kv_len - last * BN, BN, HD)
            n += 1
            if EARLY_WAIT:
                mbarrier.wait(k_full.index(n % ST), n // ST & 1, pred=tiles > 1)

            for step in range(1, tiles):
                j = last - step
                slot = n % ST
                v_slot = (n - 1) % ST
                if not EARLY_WAIT:
                    mbarrier.wait(k_full.index(slot), n // ST & 1)
                mbarrier.wait(v_full.index(v_slot), (n - 1) // ST & 1)
                if PINGPONG:
                    mbarrier.wait(turn.index(c), n + 1 + c & 1)
                s = warpgroup_mma(
                    q_tile, k_smem.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                o = warpgroup_mma(p, v_smem.index(v_slot), o, is_async=True)
                if PINGPONG:
                    mbarrier.arrive(turn.index(1 - c), count=1)
                s = warpgroup_mma_wait(1, deps=[s])
                mbarrier.arrive(k_empty.index(slot), count=1)
                s, factor = capped(s, scale, cap, SOFTCAP)
                # Rarely entered: position and length are read again rather than kept in registers.
                if CAUSAL or WINDOW:  # noqa: SIM102 — decided while compiling, unlike the inner one
                    if (j >= right) | (j < left):
                        at = gl.load(item + 2) + 64 * c + gl.arange(0, 64, layout=row_s)
                        s = masked(s, j * BN, at, gl.load(item + 4), window, CAUSAL, WINDOW, BN, scores)
                m_new = gl.maximum(m, gl.max(s, axis=1))
                alpha = gl.exp2((m - m_new) * factor)
                p_new = gl.exp2(s * factor - (m_new * factor)[:, None])
                total = total * alpha + gl.sum(p_new, axis=1)
                m = m_new
                p_new = gl.convert_layout(p_new.to(dtype), operand)
                if EARLY_WAIT:
                    mbarrier.wait(k_full.index((n + 1) % ST), (n + 1) // ST & 1, pred=step + 1 < tiles)
                o, p = warpgroup_mma_wait(0, deps=[o, p_new])
                mbarrier.arrive(v_empty.index(v_slot), count=1)
                o = o * gl.convert_layout(alpha, row_o)[:, None]
                n += 1

            v_slot = (n - 1) % ST
            mbarrier.wait(v_full.index(v_slot), (n - 1) // ST & 1)
            o = warpgroup_mma(p, v_smem.index(v_slot), o, is_async=True)
            o = warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            o, lse = finish(o, m * factor, total, row_o)
            # Read again rather than held in registers through the loop.
            head = tile // n_items
            row = gl.load(item) + 64 * c
            valid = gl.load(item + 1) - 64 * c
            gl.store(lse_ptr + head * lse_row + row + rows, lse, mask=rows < valid)
            write_out(o.to(dtype), o_desc, o_ptr, q_tile, row, valid, head, o_row, HD, output)
            mbarrier.arrive(q_empty.index(c), count=1)
            t += 1


@gluon.jit(do_not_specialize=SIZES)
def fa3_fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, work_ptr, pages_ptr, n_items, n_tiles, group,
    q_rows, q_cols, kv_rows, kv_cols, page_rows, o_row, lse_row, window, scale, cap,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, PAGE: gl.constexpr, HD: gl.constexpr,
    BN: gl.constexpr, ST: gl.constexpr, PINGPONG: gl.constexpr, EARLY_WAIT: gl.constexpr,
):  # fmt: skip
    """A persistent block: shared memory and barriers, then three partitions until the work is done."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HD], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [ST, BN, HD], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [ST, BN, HD], v_desc.layout)
    bars, turn = barriers(ST)
    smem = (q_smem, k_smem, v_smem)
    sizes = (n_items, n_tiles, o_row, lse_row, window)
    loads = (n_items, n_tiles, group, q_rows, q_cols, kv_rows, kv_cols, page_rows)
    gl.warp_specialize(
        [
            (consume, (0, o_desc, o_ptr, lse_ptr, smem, bars, turn, work_ptr, sizes, scale, cap,
                       CAUSAL, WINDOW, SOFTCAP, HD, BN, ST, PINGPONG, EARLY_WAIT)),
            (consume, (1, o_desc, o_ptr, lse_ptr, smem, bars, turn, work_ptr, sizes, scale, cap,
                       CAUSAL, WINDOW, SOFTCAP, HD, BN, ST, PINGPONG, EARLY_WAIT)),
            (produce, (q_desc, k_desc, v_desc, smem, bars, work_ptr, pages_ptr, loads, BN, ST, PAGE, 0)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
