"""Attention of draft trees over pages: the kernel; what it is for, its checks and builds are in
`tree_attention`.

A program owns a block of query rows of one sequence, one KV head and one split. Rows are (tree row, query
head of the KV head) pairs, so that a tree of n nodes and G heads fills n * G rows with every key read once
for all. Tokens before ``start`` are seen by all rows (a window aside); those after it are the step's own
rows, already written to their slots, and are masked by the ancestor words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.attention.kv_tiles import page_rows
from workbench.kernels.attention.paged_rows import by_pointer, by_tma
from workbench.kernels.attention.paged_span import normalised, peak_of
from workbench.kernels.attention.softmax import FLOOR, LIFT, finish


@triton.jit
def ancestors(words, row, here, t, start, end, W: tl.constexpr):
    """Which tokens ``t`` [BT] of the step's own, from slot ``start`` on, the rows [BM] see: bool [BM, BT]."""
    j = t - start
    own = (j >= 0) & (t < end)
    at = words + row.to(tl.int64)[:, None] * W + (j // 32)[None, :]
    word = tl.load(at, mask=here[:, None] & own[None, :], other=0)
    return ((word >> (j % 32)[None, :]) & 1) != 0


@triton.jit
def ragged_step(
    qt, peak, k, v, ks, vs, words, row, here, low, cursor, begin, start, end, table, head, KVH, state, scale,
    cap, FMT: tl.constexpr, D: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, BT: tl.constexpr,
    W: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """BT tokens from ``cursor`` on, under the mask: none before ``begin`` or from ``end`` on is read."""
    m, total, acc = state
    t, first = cursor + tl.arange(0, BT), cursor + tl.arange(0, BT // 16) * 16
    ok = (t >= begin) & (t < end)
    keep = (ok & (t < start))[None, :] & (t[None, :] >= low[:, None])
    keep = keep | ancestors(words, row, here, t, start, end, W)
    rows = page_rows(table, t, ok, head, KVH, P)
    runs = page_rows(table, first, first < end, head, KVH, P)
    return by_pointer(
        qt,
        peak,
        k,
        v,
        ks,
        vs,
        rows,
        runs,
        ok,
        keep,
        m,
        total,
        acc,
        scale,
        cap,
        FMT,
        D,
        HD,
        P,
        CAP,
        True,
        True,
    )


@triton.jit
def tree_attention_kernel(
    out, lse, q, k, v, k_tma, v_tma, ks, vs, table, blocks, starts, keys, depth, words, scale, cap, window,
    chunk, stride_q, stride_table, KVH, G: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    D: tl.constexpr, HD: tl.constexpr, P: tl.constexpr, W: tl.constexpr, FMT: tl.constexpr,
    TMA: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Program (row block, KV head, split); writes ``out`` [T, H, splits, D] and ``lse`` [T, H, splits].

    ``q`` [T, H, D]; ``blocks`` int32 [n, 3]: sequence, first row, rows left of the sequence from there on.
    ``starts`` int32 [B] cached tokens before the step's own, ``keys`` int32 [B] own ones that can be seen.
    """
    item, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b = tl.load(blocks + item * 3)
    first_row = tl.load(blocks + item * 3 + 1)
    left = tl.load(blocks + item * 3 + 2) * G
    start = tl.load(starts + b)
    pair, column = tl.arange(0, BM), tl.arange(0, HD)
    here = pair < tl.minimum(left, BM // G * G)
    row = first_row + pair // G
    member = (head * G + pair % G).to(tl.int64)
    whole_row = here[:, None] & (column < D)[None, :]
    q_at = q + row.to(tl.int64)[:, None] * stride_q + member[:, None] * D + column[None, :]
    qt = tl.load(q_at, mask=whole_row, other=0.0)
    peak = peak_of(qt)
    if FMT != "plain":
        qt = normalised(qt, peak)
    low = pair * 0
    origin = 0
    if WINDOW:
        low = tl.maximum(start + tl.load(depth + row, mask=here, other=0) - window + 1, 0)
        origin = tl.min(tl.where(here, low, start), 0)
    table += b.to(tl.int64) * stride_table
    begin = origin // P * P + split * chunk
    end = tl.minimum(start + tl.load(keys + b), begin + chunk)
    m = tl.full([BM], FLOOR, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, HD], tl.float32)
    lane, firsts = tl.arange(0, BN), tl.arange(0, BN // 16) * 16
    tiles = begin
    if WINDOW:  # tokens before the earliest window are not read: what lies there may be anything
        below = tl.maximum(origin - begin, 0)
        tiles = tl.minimum(begin + (below + BN - 1) // BN * BN, end)
        for cursor in tl.range(begin + below // BT * BT, tiles, BT):
            m, total, acc = ragged_step(
                qt, peak, k, v, ks, vs, words, row, here, low, cursor, origin, start, tiles, table, head, KVH,
                (m, total, acc), scale, cap, FMT, D, HD, P, BT, W, CAP,
            )  # fmt: skip
    whole = tiles + tl.maximum(tl.minimum(end, start) - tiles, 0) // BN * BN
    for cursor in tl.range(tiles, whole, BN):
        t = cursor + lane
        keep = t[None, :] >= low[:, None]
        if TMA:
            block = tl.load(table + cursor // P) * KVH + head
            m, total, acc = by_tma(
                qt, peak, k_tma, v_tma, ks, vs, block, cursor % P, keep, m, total, acc, scale, cap, FMT,
                D, P, BN, CAP, WINDOW,
            )  # fmt: skip
        else:
            rows = page_rows(table, t, t >= 0, head, KVH, P)
            runs = page_rows(table, cursor + firsts, firsts >= 0, head, KVH, P)
            m, total, acc = by_pointer(
                qt, peak, k, v, ks, vs, rows, runs, t >= 0, keep, m, total, acc, scale, cap, FMT,
                D, HD, P, CAP, False, WINDOW,
            )  # fmt: skip
    for cursor in tl.range(whole, end, BT):
        m, total, acc = ragged_step(
            qt, peak, k, v, ks, vs, words, row, here, low, cursor, 0, start, end, table, head, KVH,
            (m, total, acc), scale, cap, FMT, D, HD, P, BT, W, CAP,
        )  # fmt: skip
    divisor, value = finish(m, total)
    o = acc / divisor[:, None]
    if FMT != "plain":
        o = o / LIFT
    at = (row.to(tl.int64) * (KVH * G) + member) * tl.num_programs(2) + split
    tl.store(out + at[:, None] * D + column[None, :], o.to(out.dtype.element_ty), mask=whole_row)
    tl.store(lse + at, value, mask=here)
