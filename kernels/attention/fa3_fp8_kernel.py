"""The FlashAttention-3 forward kernel in FP8 (E4M3 in, float32 state, 16-bit out): Gluon, Hopper.

The structure is that of ``fa3_kernel``; what FP8 adds:
- P stays float32 round the loop and is cast just before P V, under the Q K product already in flight; carried
  as FP8 it costs hundreds of byte permutes. 8 is added in the exponent, so that small P are not flushed to
  zero, and taken out of the LSE; the output is divided by a sum with the same factor.
- V comes transposed with the tokens of every 16 permuted, so that the accumulator's registers already are the
  operand's (``layouts.permute``); ``as_operand`` asserts that no data moves.
- Scores carry a scale per (query tile, KV block): it joins the exponent's factor. The scale of V joins the
  rescale of O: O is kept in units of the current V block.
- TWO_LEVEL adds each P V tile to O in float32: the tensor core's FP8 accumulator is narrower than that. With
  OVERLAP (KV tile 64), or without it (KV tile 128, only the ping-pong hides softmax): both would spill.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from workbench.kernels.attention.fa3_parts import FLOOR, capped, finish, masked, write_out
from workbench.kernels.attention.fa3_schedule import barriers, produce, tile_of

#: Run-time sizes that change from call to call: no compile of their own for 1 or a multiple of 16.
SIZES = ("n_items", "n_tiles", "group", "heads", "kv_heads", "page_rows", "lse_row", "window")

#: P is cast as 2^8 P: at most 256, below E4M3's 448.
LIFT = gl.constexpr(8.0)


@gluon.jit
def as_operand(p, BN: gl.constexpr, operand: gl.constexpr):
    """P [64, BN] float32 as an E4M3 operand: token 16j + 8h + 2t + e becomes column 16j + 4t + 2h + e."""
    p = p.to(gl.float8e4nv).reshape([64, BN // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, BN])
    return gl.convert_layout(p, operand, assert_trivial=True)


@gluon.jit
def weighted(p8, v_tile, o, nothing, TWO_LEVEL: gl.constexpr):
    """P V of one tile on its own, or on top of O."""
    if TWO_LEVEL:
        return warpgroup_mma(p8, v_tile, nothing, use_acc=False, is_async=True)
    else:
        return warpgroup_mma(p8, v_tile, o, is_async=True)


@gluon.jit
def joined(o, part, TWO_LEVEL: gl.constexpr):
    """O with the product of the last tile in it."""
    if TWO_LEVEL:
        return o + part
    else:
        return part


@gluon.jit
def consume_fp8(
    c: gl.constexpr, o_desc, o_ptr, lse_ptr, smem, o_smem, bars, turn, work_ptr, scales, sizes, scale, cap,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, HD: gl.constexpr, BN: gl.constexpr,
    ST: gl.constexpr, PAGE: gl.constexpr, OVERLAP: gl.constexpr, TWO_LEVEL: gl.constexpr,
):  # fmt: skip
    """Consumer ``c``: rows ``64 c .. 64 c + 64`` of every tile of this block."""
    q_smem, k_smem, v_smem = smem
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    q_scale, k_scale, v_scale = scales
    n_items, n_tiles, group, heads, kv_heads, o_row, lse_row, window = sizes
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    output: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HD, 32])
    row_s: gl.constexpr = gl.SliceLayout(1, scores)
    row_o: gl.constexpr = gl.SliceLayout(1, output)
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 4)
    q_tile = q_smem.index(c)
    zero = gl.zeros([64, BN], gl.float32, scores)
    nothing = gl.zeros([64, HD], gl.float32, output)
    rows = gl.arange(0, 64, layout=row_s)
    n = 0
    t = 0
    for wave in range(gl.cdiv(n_tiles, gl.num_programs(0))):
        tile = tile_of(wave)
        if tile < n_tiles:
            item = work_ptr + tile % n_items * 8
            pos = gl.load(item + 2) + 64 * c
            kv_len = gl.load(item + 4)
            last = gl.load(item + 6) - 1
            tiles = last + 1 - gl.load(item + 5)
            head = tile // n_items
            q_factor = gl.load(q_scale + gl.load(item + 7) * heads + head) * scale
            # Scales of the KV block of tile j: entry (first block of the sequence + j BN / PAGE, KV head).
            entry = gl.load(item + 3) * kv_heads + head // group
            k_at = k_scale + entry
            v_at = v_scale + entry
            right = kv_len // BN
            left = 0
            if CAUSAL:
                right = gl.minimum(right, (pos + 1) // BN)
            if WINDOW:
                left = (pos + 64 - window + BN - 1) // BN

            slot = n % ST
            phase = n // ST & 1
            f = q_factor * gl.load(k_at + last * BN // PAGE * kv_heads)
            unit = gl.load(v_at + last * BN // PAGE * kv_heads)
            mbarrier.wait(q_full.index(c), t & 1)
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.wait(turn.index(c), n + 1 + c & 1)
            s = warpgroup_mma(q_tile, k_smem.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            mbarrier.arrive(turn.index(1 - c), count=1)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(k_empty.index(slot), count=1)
            s, factor = capped(s, f, cap, SOFTCAP)
            s = masked(s, last * BN, pos + rows, kv_len, window, CAUSAL, WINDOW, BN, scores)
            m = gl.maximum(gl.max(s, axis=1) * factor, FLOOR)
            p = gl.exp2(s * factor - (m - LIFT)[:, None])
            total = gl.sum(p, axis=1)
            o = nothing
            n += 1
            if OVERLAP:
                mbarrier.wait(k_full.index(n % ST), n // ST & 1, pred=tiles > 1)

            for step in range(1, tiles):
                j = last - step
                slot = n % ST
                v_slot = (n - 1) % ST
                f = q_factor * gl.load(k_at + j * BN // PAGE * kv_heads)
                next_unit = gl.load(v_at + j * BN // PAGE * kv_heads)
                k_tile = k_smem.index(slot).permute((1, 0))
                v_tile = v_smem.index(v_slot).permute((1, 0))
                mbarrier.wait(v_full.index(v_slot), (n - 1) // ST & 1)
                if OVERLAP:
                    mbarrier.wait(turn.index(c), n + 1 + c & 1)
                    s = warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)
                    part = weighted(as_operand(p, BN, operand), v_tile, o, nothing, TWO_LEVEL)
                    mbarrier.arrive(turn.index(1 - c), count=1)
                    s = warpgroup_mma_wait(1, deps=[s])
                else:
                    # One product after the other within a turn: half as many accumulators are alive.
                    mbarrier.wait(k_full.index(slot), n // ST & 1)
                    p8 = as_operand(p, BN, operand)
                    mbarrier.wait(turn.index(c), n + 1 + c & 1)
                    part = weighted(p8, v_tile, o, nothing, TWO_LEVEL)
                    part = warpgroup_mma_wait(0, deps=[part])
                    mbarrier.arrive(v_empty.index(v_slot), count=1)
                    s = warpgroup_mma(q_tile, k_tile, zero, use_acc=False, is_async=True)
                    mbarrier.arrive(turn.index(1 - c), count=1)
                    o = joined(o, part, TWO_LEVEL)
                    s = warpgroup_mma_wait(0, deps=[s])
                mbarrier.arrive(k_empty.index(slot), count=1)
                s, factor = capped(s, f, cap, SOFTCAP)
                # Rarely entered: position and length are read again rather than kept in registers.
                if CAUSAL or WINDOW:  # noqa: SIM102 — decided while compiling, unlike the inner one
                    if (j >= right) | (j < left):
                        at = gl.load(item + 2) + 64 * c + gl.arange(0, 64, layout=row_s)
                        s = masked(s, j * BN, at, gl.load(item + 4), window, CAUSAL, WINDOW, BN, scores)
                m_new = gl.maximum(m, gl.max(s, axis=1) * factor)
                alpha = gl.exp2(m - m_new)
                p_new = gl.exp2(s * factor - (m_new - LIFT)[:, None])
                total = total * alpha + gl.sum(p_new, axis=1)
                m = m_new
                if OVERLAP:
                    mbarrier.wait(k_full.index((n + 1) % ST), (n + 1) // ST & 1, pred=step + 1 < tiles)
                    part, p = warpgroup_mma_wait(0, deps=[part, p_new])
                    mbarrier.arrive(v_empty.index(v_slot), count=1)
                    o = joined(o, part, TWO_LEVEL)
                else:
                    p = p_new
                o = o * gl.convert_layout(alpha * (unit / next_unit), row_o)[:, None]
                unit = next_unit
                n += 1

            v_slot = (n - 1) % ST
            mbarrier.wait(v_full.index(v_slot), (n - 1) // ST & 1)
            part = weighted(
                as_operand(p, BN, operand), v_smem.index(v_slot).permute((1, 0)), o, nothing, TWO_LEVEL
            )
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            mbarrier.arrive(q_empty.index(c), count=1)
            o, lse = finish(joined(o, part, TWO_LEVEL) * unit, m - LIFT, total, row_o)
            head = tile // n_items
            row = gl.load(item) + 64 * c
            valid = gl.load(item + 1) - 64 * c
            gl.store(lse_ptr + head * lse_row + row + rows, lse, mask=rows < valid)
            write_out(o.to(o_smem.dtype), o_desc, o_ptr, o_smem.index(c), row, valid, head, o_row, HD, output)
            t += 1


@gluon.jit(do_not_specialize=SIZES)
def fa3_fwd_fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, lse_ptr, work_ptr, pages_ptr,
    q_scale_ptr, k_scale_ptr, v_scale_ptr, n_items, n_tiles, group, heads, kv_heads, page_rows,
    o_row, lse_row, window, scale, cap,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, PAGE: gl.constexpr, HD: gl.constexpr,
    BN: gl.constexpr, ST: gl.constexpr, OVERLAP: gl.constexpr, TWO_LEVEL: gl.constexpr,
):  # fmt: skip
    """A persistent block: shared memory and barriers, then three partitions until the work is done."""
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [2, 64, HD], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [ST, BN, HD], k_desc.layout)
    v_smem = gl.allocate_shared_memory(v_desc.dtype, [ST, HD, BN], v_desc.layout)
    o_smem = gl.allocate_shared_memory(o_desc.dtype, [2, 64, HD], o_desc.layout)
    bars, turn = barriers(ST)
    smem = (q_smem, k_smem, v_smem)
    scales = (q_scale_ptr, k_scale_ptr, v_scale_ptr)
    sizes = (n_items, n_tiles, group, heads, kv_heads, o_row, lse_row, window)
    # Queries [Tq, Hq, D]: heads are columns. Pages [N, Hkv, PAGE, D]: heads are PAGE rows apart.
    loads = (n_items, n_tiles, group, 0, HD, PAGE, 0, page_rows)
    gl.warp_specialize(
        [
            (consume_fp8, (0, o_desc, o_ptr, lse_ptr, smem, o_smem, bars, turn, work_ptr, scales, sizes,
                           scale, cap, CAUSAL, WINDOW, SOFTCAP, HD, BN, ST, PAGE, OVERLAP, TWO_LEVEL)),
            (consume_fp8, (1, o_desc, o_ptr, lse_ptr, smem, o_smem, bars, turn, work_ptr, scales, sizes,
                           scale, cap, CAUSAL, WINDOW, SOFTCAP, HD, BN, ST, PAGE, OVERLAP, TWO_LEVEL)),
            (produce, (q_desc, k_desc, v_desc, smem, bars, work_ptr, pages_ptr, loads, BN, ST, PAGE, HD)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
