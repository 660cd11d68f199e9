"""Paged decode over KIVI pages (arXiv 2402.02750): 4- or 2-bit codes, keys per channel, values per token.

A tile is one key group of GROUP tokens, so minimum and step of the keys are one vector over channels. Codes
are decoded to fp16, ``minimum + code * step`` with both already stored in fp16: one rounding of 2^-11. The
newest tokens, those of the page that is not full yet, lie in 16 bits in a row of the *open* pool; each split
reads what of them falls into its range.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.attention.kv_tiles import row_tile
from workbench.kernels.attention.paged_span import (
    normalised,
    peak_of,
    query_rows,
    split_range,
    store_lse,
    store_rows,
)
from workbench.kernels.attention.softmax import FLOOR, absorb, log2_scores


@triton.jit
def _codes(bytes_, shift, BITS: tl.constexpr):
    """Codes 0 .. 2^BITS - 1 as fp16: 0x6400 | code is 1024 + code."""
    code = (bytes_ >> shift) & ((1 << BITS) - 1)
    return (code.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def _keys(
    k, k_min, k_step, block, offset, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr
):
    """Keys of the group that begins at ``offset`` of page and head ``block``, fp16 [GROUP, D]."""
    SIZE: tl.constexpr = GROUP * BITS // 8
    i, d = tl.arange(0, GROUP), tl.arange(0, D)
    row = block * (P * BITS // 8) + offset * BITS // 8 + i % SIZE
    shift = (i // SIZE * BITS).to(tl.uint8)
    codes = _codes(tl.load(k + row[:, None] * D + d[None, :]), shift[:, None], BITS)
    group = (block * (P // GROUP) + offset // GROUP) * D
    low, step = tl.load(k_min + group + d), tl.load(k_step + group + d)
    return low[None, :] + codes * step[None, :]


@triton.jit
def _values(
    v, v_min, v_step, block, offset, ok, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Values of the GROUP tokens from ``offset`` on, fp16 [GROUP, D]; MASKED: 0 for tokens not ``ok``."""
    SIZE: tl.constexpr = P * BITS // 8
    t, d, c = offset + tl.arange(0, GROUP), tl.arange(0, D), tl.arange(0, D // GROUP)
    row = block * SIZE + t % SIZE
    shift = (t // SIZE * BITS).to(tl.uint8)
    codes = _codes(tl.load(v + row[:, None] * D + d[None, :]), shift[:, None], BITS)
    at = (block * P + t)[:, None] * (D // GROUP) + c[None, :]
    if MASKED:
        low = tl.load(v_min + at, mask=ok[:, None], other=0.0)
        step = tl.load(v_step + at, mask=ok[:, None], other=0.0)
    else:
        low, step = tl.load(v_min + at), tl.load(v_step + at)
    grouped = tl.reshape(codes, [GROUP, D // GROUP, GROUP])
    return tl.reshape(low[:, :, None] + grouped * step[:, :, None], [GROUP, D])


@triton.jit
def paged_kivi_kernel(
    out, lse, q, k, v, k_min, k_step, v_min, v_step, open_k, open_v, table, lengths, coded, open_row,
    scale, cap, window, chunk, stride_q, stride_table, KVH, G: tl.constexpr, BM: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, split); see `paged_rows_kernel`.

    ``coded`` int32 [B]: tokens in full pages (a multiple of P); the rest, at most P, lie in row ``open_row``
    int32 [B] of ``open_k``, ``open_v`` [rows, KV heads, P, D].
    """
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    low, begin, end = split_range(tl.load(lengths + b), split, chunk, window, P, WINDOW)
    full = tl.load(coded + b)
    table += b.to(tl.int64) * stride_table
    qt = query_rows(q, b, head, stride_q, 0, G, BM, D, D)
    peak = peak_of(qt)
    qt = normalised(qt, peak)
    m = tl.full([BM], FLOOR, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, D], tl.float32)
    lane = tl.arange(0, GROUP)
    seen = begin + tl.maximum(low - begin, 0) // GROUP * GROUP
    for start in tl.range(seen, tl.minimum(end, full), GROUP):
        ok = start + lane >= low
        block = tl.load(table + start // P).to(tl.int64) * KVH + head
        kt = _keys(k, k_min, k_step, block, start % P, D, P, BITS, GROUP)
        vt = _values(v, v_min, v_step, block, start % P, ok, D, P, BITS, GROUP, WINDOW)
        s = log2_scores(tl.dot(qt, tl.trans(kt)) * peak[:, None], scale, cap, CAP)
        m, total, acc = absorb(s, vt, ok[None, :], m, total, acc, WINDOW)
    # The open page: values of any 16-bit dtype, divided by nothing, in the query's own dtype.
    qo = query_rows(q, b, head, stride_q, 0, G, BM, D, D)
    for start in tl.range(tl.maximum(begin, full), end, GROUP):
        t = start + lane
        ok = (t >= low) & (t < end)
        rows = (tl.load(open_row + b).to(tl.int64) * KVH + head) * P + t - full
        ko = row_tile(open_k, rows, ok, D, D, True)
        vo = row_tile(open_v, rows, ok, D, D, True)
        s = log2_scores(tl.dot(qo, tl.trans(ko), input_precision="ieee"), scale, cap, CAP)
        m, total, acc = absorb(s, vo, ok[None, :], m, total, acc, True)
    at = ((b * KVH + head).to(tl.int64) * G + tl.arange(0, BM)) * tl.num_programs(2) + split
    store_rows(out, acc / store_lse(lse, m, total, at, G, BM)[:, None], at, 0, G, BM, D, D)
