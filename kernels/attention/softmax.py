"""Online softmax over KV tiles, shared by the decode kernels: one step, and the end of a range.

State of a block of BM query rows: ``peak`` the running maximum and ``total`` the running sum, both fp32 [BM],
and ``acc`` fp32 [BM, HD]. Scores are kept in units of log2 (Milakov & Gimelshein, arXiv 1805.02867; Dao et
al., arXiv 2205.14135, algorithm 1). Masked scores get the finite ``FLOOR`` and probability 0, so a row that
sees nothing never meets inf - inf; it ends with output 0 and log-sum-exp -inf.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Stands in for -inf: far below any score, and FLOOR - FLOOR is 0 instead of NaN.
FLOOR = tl.constexpr(-1.0e30)
LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
#: Value scales are multiplied by this before they meet the probabilities, and divided out at the end: small
#: probabilities times small scales would otherwise fall into fp16's subnormals.
LIFT = tl.constexpr(256.0)


@triton.jit
def capped(s, cap):
    """``cap * tanh(s / cap)`` (Gemma 2, section 2) by exponentials; exact at both infinities."""
    return cap - 2.0 * cap / (tl.exp2(s * (2.0 * LOG2E / cap)) + 1.0)


@triton.jit
def log2_scores(s, scale, cap, CAP: tl.constexpr):
    """Products of queries and keys [BM, BN] to scores in log2 units; ``scale`` is the softmax scale."""
    s = s * scale
    if CAP:
        s = capped(s, cap)
    return s * LOG2E


@triton.jit
def weigh(s, keep, peak, total, MASKED: tl.constexpr):
    """Take the scores [BM, BN] of a tile into the state; ``keep`` bool, broadcastable to [BM, BN].

    Returns the new maximum and sum, the tile's probabilities relative to the new maximum, and the factor [BM]
    by which everything accumulated before fades.
    """
    if MASKED:
        s = tl.where(keep, s, FLOOR)
    top = tl.maximum(peak, tl.max(s, 1))
    p = tl.exp2(s - top[:, None])
    if MASKED:
        p = tl.where(keep, p, 0.0)
    fade = tl.exp2(peak - top)
    return top, total * fade + tl.sum(p, 1), p, fade


@triton.jit
def absorb(s, v, keep, peak, total, acc, MASKED: tl.constexpr):
    """One whole step: scores [BM, BN] in log2 units, values [BN, HD] without scales."""
    peak, total, p, fade = weigh(s, keep, peak, total, MASKED)
    return peak, total, tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")


@triton.jit
def finish(peak, total):
    """Divisor [BM] of the accumulator and natural log-sum-exp [BM]; 1 and -inf for rows that saw nothing."""
    seen = total > 0.0
    divisor = tl.where(seen, total, 1.0)
    return divisor, tl.where(seen, (peak + tl.log2(divisor)) * LN2, -float("inf"))
