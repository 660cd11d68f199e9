"""From logits to a law, one program per row: mask, temperature, top-k, top-p, min-p, softmax.

The order and the ties are the engine's (`workbench.engine.processing`): each filter sees the law the one
before left, renormalised; equal scores are ordered by id, lowest first. Nothing is sorted: the k-th largest
score, or the probability at which the nucleus ends, is found two bits at a time by counting (or weighing)
what lies beyond each of four candidates, sixteen passes over the row in all.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bits(x):
    """Magnitude bits of fp32 as int32: ordered as the magnitudes are."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def kth_magnitude(row, V, k, BV: tl.constexpr):
    """Bits of the k-th smallest magnitude of fp32 ``row`` [V], and how many are smaller."""
    found = 0
    lane = tl.arange(0, 4)
    for step in tl.range(0, 16):
        shift = tl.maximum(29 - 2 * step, 0)  # 31 bits: the last is alone
        limit = found + (lane << shift) + ((1 << shift) - 1)
        count = tl.zeros([4], tl.int32)
        for start in tl.range(0, V, BV):
            v = start + tl.arange(0, BV)
            bits = _bits(tl.load(row + v, mask=v < V, other=float("nan")))
            inside = (v < V)[:, None] & (bits[:, None] <= limit[None, :])
            count += tl.sum(inside.to(tl.int32), 0)
        digit = tl.sum((count < k).to(tl.int32), 0)
        found += tl.minimum(digit, 3) << shift
    below = 0
    for start in tl.range(0, V, BV):
        v = start + tl.arange(0, BV)
        bits = _bits(tl.load(row + v, mask=v < V, other=float("nan")))
        below += tl.sum(((v < V) & (bits < found)).to(tl.int32), 0)
    return found, below


@triton.jit
def keep_ties(row, V, edge, room, BV: tl.constexpr, ABOVE: tl.constexpr, total):
    """Filter ``row`` [V] of scores in place: what lies beyond ``edge`` stays, of what equals it the first
    ``room``.

    Without ABOVE the edge is in magnitudes of scores, with it in probabilities ``exp(score) / total``.
    """
    seen = 0
    for start in tl.range(0, V, BV):
        v = start + tl.arange(0, BV)
        x = tl.load(row + v, mask=v < V, other=-float("inf"))
        if ABOVE:
            bits = _bits(tl.div_rn(tl.exp(x), tl.zeros_like(x) + total))
            beyond = bits > edge
        else:
            bits = _bits(x)
            beyond = bits < edge
        tie = (bits == edge) & (v < V)
        order = seen + tl.cumsum(tie.to(tl.int32), 0)
        kept = beyond | (tie & (order <= room))
        tl.store(row + v, tl.where(kept, x, -float("inf")), mask=v < V)
        seen += tl.sum(tie.to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def mass(row, V, BV: tl.constexpr):
    """``sum exp(score)`` of a row, float32."""
    total = tl.zeros([1], tl.float64)
    for start in tl.range(0, V, BV):
        v = start + tl.arange(0, BV)
        total += tl.sum(tl.exp(tl.load(row + v, mask=v < V, other=-float("inf"))).to(tl.float64), 0)
    return tl.sum(total, 0).to(tl.float32)


@triton.jit
def nucleus_edge(row, V, total, wanted, BV: tl.constexpr):
    """Bits of the smallest probability in the nucleus of mass ``wanted`` (float64), and the mass above it."""
    found = 0
    lane = tl.arange(0, 4)
    for step in tl.range(0, 16):
        shift = tl.maximum(29 - 2 * step, 0)  # 31 bits: the last is alone
        limit = found + (lane << shift) + ((1 << shift) - 1)
        above = tl.zeros([4], tl.float64)
        for start in tl.range(0, V, BV):
            v = start + tl.arange(0, BV)
            e = tl.exp(tl.load(row + v, mask=v < V, other=-float("inf")))
            p = tl.div_rn(e, tl.zeros_like(e) + total)
            over = _bits(p)[:, None] > limit[None, :]
            above += tl.sum(tl.where(over, p[:, None], 0.0).to(tl.float64), 0)
        digit = tl.sum((above >= wanted).to(tl.int32), 0)
        found += tl.minimum(digit, 3) << shift
    above = tl.zeros([1], tl.float64)
    for start in tl.range(0, V, BV):
        v = start + tl.arange(0, BV)
        e = tl.exp(tl.load(row + v, mask=v < V, other=-float("inf")))
        p = tl.div_rn(e, tl.zeros_like(e) + total)
        above += tl.sum(tl.where(_bits(p) > found, p, 0.0).to(tl.float64), 0)
    return found, tl.sum(above, 0)


@triton.jit
def law_kernel(
    law, status, logits, words, temperatures, top_ks, top_ps, min_logs, V, stride, W,
    MASK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Program (row): ``logits`` [R, V] to ``law`` fp32 [R, V].

    ``words`` int32 [R, W]: bit ``v % 32`` of word ``v // 32`` allows token ``v``. ``status`` int32 [R]: 0, 1
    when the mask allows nothing, 2 when logits are NaN or +inf. ``top_ks`` 0 and ``top_ps`` 1 are off;
    ``min_logs`` is the logarithm of min-p, -inf when off; temperature 0 gives a one-hot law.
    """
    r = tl.program_id(0).to(tl.int64)
    row = law + r * V
    infinity = float("inf")
    peak = -infinity
    first = 0
    bad = 0
    for start in tl.range(0, V, BV):
        v = start + tl.arange(0, BV)
        x = tl.load(logits + r * stride + v, mask=v < V, other=-infinity).to(tl.float32)
        if MASK:
            word = tl.load(words + r * W + v // 32, mask=v < V, other=0)
            x = tl.where(((word >> (v % 32)) & 1) != 0, x, -infinity)
        tl.store(row + v, x, mask=v < V)
        bad += tl.sum(((x != x) | (x == infinity)).to(tl.int32), 0)
        top, at = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
        first = tl.where(top > peak, start + at, first)
        peak = tl.maximum(peak, top)
    empty = (peak == -infinity) & (bad == 0)
    tl.store(status + r, tl.where(bad > 0, 2, tl.where(empty, 1, 0)))
    tl.debug_barrier()
    temperature = tl.load(temperatures + r)
    if (temperature == 0.0) | empty | (bad > 0):
        chosen = tl.where(empty | (bad > 0), -1, first)
        for start in tl.range(0, V, BV):
            v = start + tl.arange(0, BV)
            tl.store(row + v, tl.where(v == chosen, 1.0, 0.0), mask=v < V)
    else:
        # The peak is moved to 0 before dividing: however small the temperature, 0 / T stays 0.
        for start in tl.range(0, V, BV):
            v = start + tl.arange(0, BV)
            x = tl.load(row + v, mask=v < V, other=-infinity) - peak
            tl.store(row + v, tl.div_rn(x, tl.zeros_like(x) + temperature), mask=v < V)
        tl.debug_barrier()
        k = tl.load(top_ks + r)
        if (k > 0) & (k < V):
            edge, below = kth_magnitude(row, V, k, BV)
            keep_ties(row, V, edge, k - below, BV, False, 1.0)
        wanted = tl.load(top_ps + r)
        if wanted < 1.0:
            total = mass(row, V, BV)
            edge, above = nucleus_edge(row, V, total, wanted, BV)
            # Ties join while the mass before each is short of what is wanted; the nucleus is never empty.
            tie = edge.to(tl.float32, bitcast=True).to(tl.float64)
            room = tl.where(tie > 0.0, tl.ceil((wanted - above) / tie), V + 0.0)
            keep_ties(row, V, edge, tl.maximum(tl.minimum(room, V + 0.0), 1.0).to(tl.int32), BV, True, total)
        low = tl.load(min_logs + r)
        total = tl.zeros([1], tl.float64)
        for start in tl.range(0, V, BV):
            v = start + tl.arange(0, BV)
            x = tl.load(row + v, mask=v < V, other=-infinity)
            total += tl.sum(tl.where(x >= low, tl.exp(x), 0.0).to(tl.float64), 0)
        norm = tl.sum(total, 0).to(tl.float32)
        for start in tl.range(0, V, BV):
            v = start + tl.arange(0, BV)
            x = tl.load(row + v, mask=v < V, other=-infinity)
            e = tl.where(x >= low, tl.exp(x), 0.0)
            tl.store(row + v, tl.div_rn(e, tl.zeros_like(e) + norm), mask=v < V)
