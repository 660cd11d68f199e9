"""How one tile of cached keys or values comes out of a page, by format.

Every loader returns [BN, HD] in the dtype of the dot products: the pages' own for *plain* formats, fp16 for
coded ones, where every value of E4M3, INT8 and E2M1 times E4M3 is exact. Scales per token stay outside: they
multiply scores and probabilities, BM x BN numbers instead of BN x HD. ``rows`` int64 [BN] number the rows of
a plane seen as [pages * KV heads * P, ...]; the page layouts are those of `workbench.kernels.layouts`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_rows(table, tokens, ok, head, KVH, P: tl.constexpr):
    """Rows int64 [BN] of ``tokens`` through a sequence's block ``table``; masked tokens point into page 0."""
    page = tl.load(table + tokens // P, mask=ok, other=0).to(tl.int64)
    return (page * KVH + head) * P + tokens % P


@triton.jit
def row_tile(plane, rows, ok, D: tl.constexpr, HD: tl.constexpr, MASKED: tl.constexpr):
    """Elements [BN, HD] of a plane [rows, D] as stored; masked rows, and columns beyond D, are 0."""
    column = tl.arange(0, HD)
    at = plane + rows[:, None] * D + column[None, :]
    if MASKED:
        if D == HD:
            return tl.load(at, mask=ok[:, None], other=0.0)
        else:
            return tl.load(at, mask=ok[:, None] & (column < D)[None, :], other=0.0)
    else:
        if D == HD:
            return tl.load(at)
        else:
            return tl.load(at, mask=(column < D)[None, :], other=0.0)


@triton.jit
def column_tile(plane, runs, D: tl.constexpr, P: tl.constexpr):
    """Elements [BN, D] of a transposed plane [pages * KV heads, D, P].

    ``runs`` int64 [BN / 16] are the rows of every 16th token: 16 tokens lie side by side, one wide load.
    """
    R: tl.constexpr = runs.shape[0]
    first = (runs // P * (P * D) + runs % P)[None, :, None]
    at = plane + first + (tl.arange(0, D) * P)[:, None, None] + tl.arange(0, 16)[None, None, :]
    return tl.trans(tl.reshape(tl.load(at), [D, R * 16]))


@triton.jit
def token_scales(plane, rows, ok):
    """Scales fp32 [BN], one per row; masked ones are 0, whatever lies there."""
    return tl.load(plane + rows, mask=ok, other=0.0).to(tl.float32)


@triton.jit
def int8_values(codes):
    """Signed bytes as fp16, exactly, without the slow integer-to-float unit.

    The bits 0x6400 | u are the fp16 number 1024 + u; with u = code + 128 one subtraction is left.
    """
    flipped = (codes.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16)
    return (flipped | 0x6400).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def word_bytes(words):
    """Bytes of int32 words [BN, N] in memory order, as uint16 [BN, 4 N].

    Values summed over tokens lie with tokens on the slow axis; read as bytes they would cross shared memory
    one byte at a time, read as words they need no byte-wide load at all.
    """
    low = tl.join((words & 0xFF).to(tl.uint16), ((words >> 16) & 0xFF).to(tl.uint16))
    high = tl.join(((words >> 8) & 0xFF).to(tl.uint16), ((words >> 24) & 0xFF).to(tl.uint16))
    BN: tl.constexpr = words.shape[0]
    return tl.reshape(tl.join(low, high), [BN, 4 * words.shape[1]])


@triton.jit
def int8_words(words):
    """`int8_values` of the four bytes of each int32 word: [BN, N] to fp16 [BN, 4 N]."""
    biased = word_bytes(words ^ -2139062144) | 0x6400  # 0x80 flipped in every byte
    return biased.to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def e2m1_values(nibbles):
    """E2M1 codes (uint16 0..15) as fp16 / 2^14, exactly.

    Sign, exponent and mantissa moved to their places in fp16 make a number whose bias is larger by 14.
    """
    return (((nibbles & 7) << 9) | ((nibbles & 8) << 12)).to(tl.float16, bitcast=True)


@triton.jit
def block_scaled(values, scales, BLOCK: tl.constexpr):
    """Values fp16 [BN, N] times scales [BN, N / BLOCK], one per BLOCK neighbours."""
    BN: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    blocked = tl.reshape(values, [BN, N // BLOCK, BLOCK]) * scales.to(tl.float16)[:, :, None]
    return tl.reshape(blocked, [BN, N])
