"""What every paged decode kernel begins and ends with: its range of tokens, its query rows, its output.

A program owns one sequence, one KV head and one split. The G query heads of the KV head are packed into the
rows of one tile, so each K and V is read once for all of them. Splits are ranges of ``chunk`` tokens counted
from the first page a window still touches: what a split holds depends on its sequence alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.attention.softmax import finish


@triton.jit
def split_range(length, split, chunk, window, P: tl.constexpr, WINDOW: tl.constexpr):
    """First visible token, begin and end of a split; begin >= end when nothing is left for it."""
    low = 0
    if WINDOW:
        low = tl.maximum(length - window, 0)
    begin = low // P * P + split * chunk
    return low, begin, tl.minimum(length, begin + chunk)


@triton.jit
def query_rows(
    q, b, head, stride_q, start, G: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, N: tl.constexpr
):
    """Columns ``start`` .. ``start + N`` (below D) of a KV head's G query heads, [BM, N]; the rest is 0."""
    member, column = tl.arange(0, BM), start + tl.arange(0, N)
    at = q + b.to(tl.int64) * stride_q + (head * G + member)[:, None] * D + column[None, :]
    return tl.load(at, mask=(member < G)[:, None] & (column < D)[None, :], other=0.0)


@triton.jit
def peak_of(q):
    """Largest magnitude fp32 [BM] of each query row, 1 for a zero row: queries are divided by it before they
    are rounded to fp16, so that no bf16 query overflows."""
    peak = tl.max(tl.abs(q.to(tl.float32)), 1)
    return tl.where(peak > 0.0, peak, 1.0)


@triton.jit
def normalised(q, peak):
    """Queries divided by their peaks, fp16."""
    return (q.to(tl.float32) / peak[:, None]).to(tl.float16)


@triton.jit
def store_lse(lse, m, total, at, G: tl.constexpr, BM: tl.constexpr):
    """Write the log-sum-exp of the G heads at ``at`` int64 [BM]; returns the accumulator's divisor."""
    divisor, value = finish(m, total)
    tl.store(lse + at, value, mask=tl.arange(0, BM) < G)
    return divisor


@triton.jit
def store_rows(out, o, at, start, G: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    """Write ``o`` [BM, N] to columns ``start`` .. of the rows ``at``, in the dtype of ``out``."""
    member, column = tl.arange(0, BM), start + tl.arange(0, N)
    where = out + at[:, None] * D + column[None, :]
    tl.store(where, o.to(out.dtype.element_ty), mask=(member < G)[:, None] & (column < D)[None, :])
