"""Noise that belongs to a position, on the device: the same numbers as the engine's.

Philox4x64-10 (Salmon et al., SC 2011) with NumPy's conventions: key (seed, 0), counter (block, position,
stream, sample), blocks counted from 1, four 64-bit words a block. A uniform number is the word's upper 53
bits times 2^-53. Nothing is stepped, so a token does not depend on its batch, on chunking or on how many
drafts were checked before it. Coins and drafted tokens belong to the position at which their round began; how
far ahead they are is added to the stream, `AHEAD` a place.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Streams of randomness: the token itself, acceptance coins of drafts, drafted tokens.
TOKEN, COIN, DRAFT = 0, 1, 2
AHEAD = 1 << 8

_M0 = tl.constexpr(0xD2E7470EE14C6C93)
_M1 = tl.constexpr(0xCA5A826395121157)
_W0 = tl.constexpr(0x9E3779B97F4A7C15)
_W1 = tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def philox(block, position, stream, sample, seed):
    """Four uint64 words of counter blocks ``block`` (uint64, any shape); the rest are uint64 scalars."""
    zero = block ^ block
    c0, c1, c2, c3 = block, zero + position, zero + stream, zero + sample
    k0, k1 = zero + seed, zero
    for _ in tl.static_range(10):
        low0, high0 = c0 * _M0, tl.umulhi(c0, zero + _M0)
        low1, high1 = c2 * _M1, tl.umulhi(c2, zero + _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    return c0, c1, c2, c3


@triton.jit
def unit(word):
    """A 64-bit word as a float64 in [0, 1)."""
    return (word >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def uniforms(first, position, stream, sample, seed, BV: tl.constexpr):
    """Uniform numbers ``first`` .. ``first + BV`` (a multiple of 4) of a key, float64 [BV]."""
    block = (first // 4 + 1 + tl.arange(0, BV // 4)).to(tl.uint64)
    w0, w1, w2, w3 = philox(block, position, stream, sample, seed)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return unit(tl.reshape(words, [BV]))


@triton.jit
def uniform(i, position, stream, sample, seed):
    """The ``i``-th uniform number of a key, float64."""
    w0, w1, w2, w3 = philox((i // 4 + 1).to(tl.uint64), position, stream, sample, seed)
    lane = i % 4
    return unit(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)))


@triton.jit
def exponential(u):
    """Standard exponential numbers of uniform ones; 0 stands for the smallest half step."""
    return -tl.log(tl.maximum(u, 5.551115123125783e-17))
