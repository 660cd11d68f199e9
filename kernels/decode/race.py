"""Drawing a token by a race: argmax of p / E with E exponential, the Gumbel-max trick with half the
logarithms.

One program per row and block of the vocabulary, then one per row over the blocks. A token's noise depends on
its id alone, so filters that remove others do not change it; probability 0 is never drawn, and of equal
results the lowest id wins. Law and noise meet in float64, as in the engine.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.decode.noise import exponential, uniforms


@triton.jit
def race_kernel(best, ids, law, seeds, samples, positions, V, stride, STREAM: tl.constexpr, BV: tl.constexpr):
    """Program (row, block): ``best`` float64 and ``ids`` int32 [R, blocks] of a ``law`` [R, V]."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = block * BV + tl.arange(0, BV)
    p = tl.load(law + row * stride + v, mask=v < V, other=0.0).to(tl.float64)
    seed, sample = tl.load(seeds + row).to(tl.uint64), tl.load(samples + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    u = uniforms(block * BV, position, STREAM, sample, seed, BV)
    finish = tl.where(p > 0.0, p / exponential(u), -1.0)
    value, at = tl.max(finish, 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + block
    tl.store(best + out, value)
    tl.store(ids + out, block * BV + at)


@triton.jit
def peak_kernel(best, ids, x, V, stride, BV: tl.constexpr):
    """Program (row, block): like `race_kernel`, for the largest element of ``x`` [R, V] itself."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = block * BV + tl.arange(0, BV)
    score = tl.load(x + row * stride + v, mask=v < V, other=-float("inf")).to(tl.float32)
    value, at = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
    out = row * tl.num_programs(1) + block
    tl.store(best + out, value.to(tl.float64))
    tl.store(ids + out, block * BV + at)


@triton.jit
def winner_kernel(token, best, ids, floor, N, NP: tl.constexpr):
    """Program (row): the best of N blocks; ``token`` int64 [R], -1 when none of them exceeds ``floor``."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, NP)
    value = tl.load(best + row * N + i, mask=i < N, other=-float("inf"))
    top, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    found = tl.load(ids + row * N + at).to(tl.int64)
    tl.store(token + row, tl.where(top > floor, found, -1))
