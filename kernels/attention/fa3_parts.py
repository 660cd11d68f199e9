"""Pieces of a consumer warpgroup: masks, soft-cap, a clean V tail, and the way the result leaves.

Scores are kept raw; ``scale`` (already times log2 e) enters with the exponent, so that softmax costs one
fused multiply-add and one EX2 per score. A masked score is -inf while the running maximum starts at a finite
floor: a row that has seen no key keeps a total of 0 and yields zero and an LSE of -inf, never NaN.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from workbench.kernels.attention.gluon_names import tma_store

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-1.0e30)


@gluon.jit
def capped(s, scale, cap, SOFTCAP: gl.constexpr):
    """Scores and the factor that takes them to log2: ``cap tanh(s scale / cap)``.

    tanh(x) = 1 - 2 / (e^2x + 1); with a cap, ``scale`` is given as ``2 log2(e) scale / cap``.
    """
    if SOFTCAP:
        return cap - 2.0 * cap / (gl.exp2(s * scale) + 1.0), LOG2_E
    else:
        return s, scale


@gluon.jit
def masked(
    s,
    first,
    pos,
    kv_len,
    window,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    BN: gl.constexpr,
    layout: gl.constexpr,
):
    """Scores of keys ``first .. first + BN``, -inf where a query at ``pos`` does not see the key."""
    keys = first + gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    seen = (keys < kv_len)[None, :]
    if CAUSAL:
        seen = seen & (keys[None, :] <= pos[:, None])
    if WINDOW:
        seen = seen & (keys[None, :] > (pos - window)[:, None])
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def clean_tail(v_tile, valid, BN: gl.constexpr, HD: gl.constexpr):
    """Zero the rows from ``valid`` on of a V tile in shared memory.

    Slots behind the end of a sequence may hold anything, and 0 x NaN is NaN. Both consumers do this to the
    same tile without waiting for each other: they write equal bits.
    """
    cols: gl.constexpr = HD // 8 if HD < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // cols, cols], [4, 1], [1, 0])
    for i in gl.static_range(BN // 16):
        if valid < (i + 1) * 16:
            part = v_tile.slice(i * 16, 16)
            rows = i * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
            part.store(gl.where((rows < valid)[:, None], part.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def finish(o, m, total, row_o: gl.constexpr):
    """Normalised output and LSE (natural log) of a block of rows; ``m`` in log2 units."""
    seen = total != 0.0  # NaN counts as seen: it must reach the result
    total = gl.where(seen, total, 1.0)
    lse = gl.where(seen, (m + gl.log2(total)) * LN_2, float("-inf"))
    o = o * gl.convert_layout(gl.where(seen, 1.0 / total, 0.0), row_o)[:, None]
    return o, lse


@gluon.jit
def write_out(o, o_desc, o_ptr, o_tile, row, rows, head, o_row, HD: gl.constexpr, layout: gl.constexpr):
    """A full block leaves by TMA through shared memory; a ragged one row by row, within its sequence."""
    if rows >= 64:
        o_tile.store(o)
        fence_async_shared()
        tma_store(o_desc, [row, head * HD], o_tile)
        tma.store_wait(0)
    else:
        i = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        d = gl.arange(0, HD, layout=gl.SliceLayout(0, layout))
        where = (row + i).to(gl.int64)[:, None] * o_row + (head * HD + d)[None, :]
        gl.store(o_ptr + where, o, mask=(i < rows)[:, None] & (d < HD)[None, :])
