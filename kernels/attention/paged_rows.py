"""Paged decode over pages whose rows hold one token: plain 16- or 32-bit, INT8, and FP8 with V transposed.

Whole tiles of BN tokens come by the copy engine (TMA: one tile is one contiguous block of a page, which
needs pages of at least BN tokens) or by pointers, which take any page size. The ragged end, and the ragged
beginning of a window, are read by masked steps of BT tokens: slots that no token owns are never loaded, so
their content cannot reach the output, and the whole tiles need no mask at all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.attention.kv_tiles import (
    column_tile,
    int8_values,
    int8_words,
    page_rows,
    row_tile,
    token_scales,
)
from workbench.kernels.attention.paged_span import (
    normalised,
    peak_of,
    query_rows,
    split_range,
    store_lse,
    store_rows,
)
from workbench.kernels.attention.softmax import FLOOR, LIFT, log2_scores, weigh


@triton.jit
def attend_tile(
    q, peak, k, v, sk, sv, keep, m, total, acc, scale, cap, FMT: tl.constexpr, CAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One step with keys and values [BN, HD] and their scales [BN]; ``keep`` broadcastable to [BM, BN]."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if FMT != "plain":
        s = s * peak[:, None] * sk[None, :]
    m, total, p, fade = weigh(log2_scores(s, scale, cap, CAP), keep, m, total, MASKED)
    if FMT != "plain":
        p = p * (sv * LIFT)[None, :]
    return m, total, tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")


@triton.jit
def by_pointer(
    q, peak, k, v, ks, vs, rows, runs, ok, keep, m, total, acc, scale, cap, FMT: tl.constexpr,
    D: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, CAP: tl.constexpr, RAGGED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One step read by pointers; RAGGED: only tokens that are ``ok`` may be used, MASKED: ``keep``
    applies."""
    sk = peak
    sv = peak
    if FMT == "fp8":
        kt = row_tile(k, rows, ok, D, HD, RAGGED).to(tl.float16)
        vt = column_tile(v, runs, D, P).to(tl.float16)
        if RAGGED:  # wide loads also fetch what no token owns
            vt = tl.where(ok[:, None], vt, 0.0)
    elif FMT == "int8":
        kt = int8_values(row_tile(k, rows, ok, D, HD, RAGGED))
        vt = int8_words(row_tile(v, rows, ok, D // 4, HD // 4, RAGGED))
    else:
        kt = row_tile(k, rows, ok, D, HD, RAGGED)
        vt = row_tile(v, rows, ok, D, HD, RAGGED)
    if FMT != "plain":
        sk = token_scales(ks, rows, ok)
        sv = token_scales(vs, rows, ok)
    return attend_tile(q, peak, kt, vt, sk, sv, keep, m, total, acc, scale, cap, FMT, CAP, MASKED)


@triton.jit
def by_tma(
    q, peak, k_tma, v_tma, ks, vs, block, offset, keep, m, total, acc, scale, cap, FMT: tl.constexpr,
    D: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One whole tile read by the copy engine from ``offset`` on of page and head ``block``."""
    sk = peak
    sv = peak
    row = block * P + offset
    kt = k_tma.load([row, 0])
    if FMT == "fp8":
        vt = tl.trans(v_tma.load([block * D, offset])).to(tl.float16)
        kt = kt.to(tl.float16)
    else:
        vt = v_tma.load([row, 0])
    if FMT == "int8":
        kt = int8_values(kt)
        vt = int8_words(vt)
    if FMT != "plain":
        at = row.to(tl.int64) + tl.arange(0, BN)
        sk = tl.load(ks + at).to(tl.float32)
        sv = tl.load(vs + at).to(tl.float32)
    return attend_tile(q, peak, kt, vt, sk, sv, keep, m, total, acc, scale, cap, FMT, CAP, MASKED)


@triton.jit
def paged_rows_kernel(
    out, lse, q, k, v, k_tma, v_tma, ks, vs, table, lengths, scale, cap, window, chunk, stride_q,
    stride_table, KVH, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    D: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, FMT: tl.constexpr, TMA: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Program (sequence, KV head, split); writes ``out`` [B, H, splits, D] and ``lse`` [B, H, splits].

    ``q`` [B, H, D]; ``table`` int32 [B, pages], ``lengths`` int32 [B]; int8 values ``v`` as int32 words.
    """
    b, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    low, begin, end = split_range(tl.load(lengths + b), split, chunk, window, P, WINDOW)
    table += b.to(tl.int64) * stride_table
    qt = query_rows(q, b, head, stride_q, 0, G, BM, D, HD)
    peak = peak_of(qt)
    if FMT != "plain":
        qt = normalised(qt, peak)
    m = tl.full([BM], FLOOR, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, HD], tl.float32)
    few, lane = tl.arange(0, BT), tl.arange(0, BN)
    first, firsts = tl.arange(0, BT // 16) * 16, tl.arange(0, BN // 16) * 16
    cursor = begin
    if WINDOW:
        below = tl.maximum(low - begin, 0)
        cursor = tl.minimum(begin + (below + BN - 1) // BN * BN, end)
        for start in tl.range(begin + below // BT * BT, cursor, BT):
            t = start + few
            ok = (t >= low) & (t < end)
            rows = page_rows(table, t, ok, head, KVH, P)
            runs = page_rows(table, start + first, first >= 0, head, KVH, P)
            m, total, acc = by_pointer(
                qt, peak, k, v, ks, vs, rows, runs, ok, ok[None, :], m, total, acc, scale, cap, FMT,
                D, HD, P, CAP, True, True,
            )  # fmt: skip
    whole = cursor + tl.maximum(end - cursor, 0) // BN * BN
    for start in tl.range(cursor, whole, BN):
        if TMA:
            block = tl.load(table + start // P) * KVH + head
            m, total, acc = by_tma(
                qt, peak, k_tma, v_tma, ks, vs, block, start % P, peak, m, total, acc, scale, cap, FMT,
                D, P, BN, CAP, False,
            )  # fmt: skip
        else:
            t = start + lane
            rows = page_rows(table, t, t >= 0, head, KVH, P)
            runs = page_rows(table, start + firsts, firsts >= 0, head, KVH, P)
            m, total, acc = by_pointer(
                qt, peak, k, v, ks, vs, rows, runs, t >= 0, peak, m, total, acc, scale, cap, FMT,
                D, HD, P, CAP, False, False,
            )  # fmt: skip
    for start in tl.range(whole, end, BT):
        t = start + few
        ok = t < end
        rows = page_rows(table, t, ok, head, KVH, P)
        runs = page_rows(table, start + first, first >= 0, head, KVH, P)
        m, total, acc = by_pointer(
            qt, peak, k, v, ks, vs, rows, runs, ok, ok[None, :], m, total, acc, scale, cap, FMT,
            D, HD, P, CAP, True, True,
        )  # fmt: skip
    at = ((b * KVH + head).to(tl.int64) * G + tl.arange(0, BM)) * tl.num_programs(2) + split
    o = acc / store_lse(lse, m, total, at, G, BM)[:, None]
    if FMT != "plain":
        o = o / LIFT
    store_rows(out, o, at, 0, G, BM, D, HD)
