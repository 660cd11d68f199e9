"""Paged decode over NVFP4 pages: E2M1 codes, an E4M3 scale per 16 dims, one fp32 scale per tensor.

Byte ``i`` of a row holds dims ``i`` and ``i + D/2``, so both halves come out of one load as contiguous tiles,
and each product splits in two: scores are the sum over both halves, outputs have a half each. A code times
its block scale is exact in fp16, and stays so divided by 2^14, which saves a multiplication per element;
tensor scales and 2^14 are applied to scores and outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.attention.kv_tiles import block_scaled, e2m1_values, page_rows, row_tile, word_bytes
from workbench.kernels.attention.paged_span import (
    normalised,
    peak_of,
    query_rows,
    split_range,
    store_lse,
    store_rows,
)
from workbench.kernels.attention.softmax import FLOOR, log2_scores, weigh

_BIAS = tl.constexpr(16384.0)


@triton.jit
def _halves(codes, scales, rows, ok, D: tl.constexpr, MASKED: tl.constexpr):
    """Dims below and above D/2, each fp16 [BN, D/2] / 2^14; ``codes`` int32 words [rows, D/8]."""
    both = word_bytes(row_tile(codes, rows, ok, D // 8, D // 8, MASKED))
    # One row of scales is the low half's blocks, then the high half's.
    below = row_tile(scales, rows * 2, ok, D // 32, D // 32, MASKED)
    above = row_tile(scales, rows * 2 + 1, ok, D // 32, D // 32, MASKED)
    return block_scaled(e2m1_values(both & 15), below, 16), block_scaled(e2m1_values(both >> 4), above, 16)


@triton.jit
def _step(
    q0, q1, k, v, ks, vs, rows, ok, m, total, a0, a1, unit, scale, cap, D: tl.constexpr,
    CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k0, k1 = _halves(k, ks, rows, ok, D, MASKED)
    s = tl.dot(q1, tl.trans(k1), tl.dot(q0, tl.trans(k0))) * unit[:, None]
    m, total, p, fade = weigh(log2_scores(s, scale, cap, CAP), ok[None, :], m, total, MASKED)
    v0, v1 = _halves(v, vs, rows, ok, D, MASKED)
    p = p.to(tl.float16)
    return m, total, tl.dot(p, v0, a0 * fade[:, None]), tl.dot(p, v1, a1 * fade[:, None])


@triton.jit
def paged_fp4_kernel(
    out, lse, q, k, v, ks, vs, table, lengths, scale, cap, k_scale, v_scale, window, chunk, stride_q,
    stride_table, KVH, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, split); see `paged_rows_kernel`. ``k``, ``v`` are int32 words of codes."""
    H: tl.constexpr = D // 2
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    low, begin, end = split_range(tl.load(lengths + b), split, chunk, window, P, WINDOW)
    table += b.to(tl.int64) * stride_table
    q0 = query_rows(q, b, head, stride_q, 0, G, BM, D, H)
    q1 = query_rows(q, b, head, stride_q, H, G, BM, D, H)
    peak = tl.maximum(peak_of(q0), peak_of(q1))
    q0 = normalised(q0, peak)
    q1 = normalised(q1, peak)
    unit = peak * (k_scale * _BIAS)
    m = tl.full([BM], FLOOR, tl.float32)
    total = tl.zeros([BM], tl.float32)
    a0 = tl.zeros([BM, H], tl.float32)
    a1 = tl.zeros([BM, H], tl.float32)
    few, lane = tl.arange(0, BT), tl.arange(0, BN)
    cursor = begin
    if WINDOW:
        below = tl.maximum(low - begin, 0)
        cursor = tl.minimum(begin + (below + BN - 1) // BN * BN, end)
        for start in tl.range(begin + below // BT * BT, cursor, BT):
            t = start + few
            ok = (t >= low) & (t < end)
            rows = page_rows(table, t, ok, head, KVH, P)
            m, total, a0, a1 = _step(
                q0, q1, k, v, ks, vs, rows, ok, m, total, a0, a1, unit, scale, cap, D, CAP, True
            )
    whole = cursor + tl.maximum(end - cursor, 0) // BN * BN
    for start in tl.range(cursor, whole, BN):
        t = start + lane
        rows = page_rows(table, t, t >= 0, head, KVH, P)
        m, total, a0, a1 = _step(
            q0, q1, k, v, ks, vs, rows, t >= 0, m, total, a0, a1, unit, scale, cap, D, CAP, False
        )
    for start in tl.range(whole, end, BT):
        t = start + few
        rows = page_rows(table, t, t < end, head, KVH, P)
        m, total, a0, a1 = _step(
            q0, q1, k, v, ks, vs, rows, t < end, m, total, a0, a1, unit, scale, cap, D, CAP, True
        )
    at = ((b * KVH + head).to(tl.int64) * G + tl.arange(0, BM)) * tl.num_programs(2) + split
    factor = v_scale * _BIAS / store_lse(lse, m, total, at, G, BM)
    store_rows(out, a0 * factor[:, None], at, 0, G, BM, D, H)
    store_rows(out, a1 * factor[:, None], at, H, G, BM, D, H)
