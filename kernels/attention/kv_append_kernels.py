"""Writing new rows to pages, and encoding full pages: the kernels; see `kv_append` for the layouts.

A row is handled as two halves of D/2 dims: the pairs that RoPE turns, and the pairs that share a byte in FP4.
"""

from __future__ import annotations

import triton
import triton.language as tl

from workbench.kernels.attention.kv_encode import (
    affine,
    affine_codes,
    e4m3_codes,
    int8_codes,
    nvfp4_block,
    row_scale,
)


@triton.jit
def _write(plane, scales, lo, hi, row, tensor_scale, D: tl.constexpr, P: tl.constexpr, FMT: tl.constexpr,
           TRANSPOSED: tl.constexpr):  # fmt: skip
    """Encode the halves ``lo``, ``hi`` fp32 [D/2] of one row into row ``row`` (int64) of a plane."""
    H: tl.constexpr = D // 2
    i = tl.arange(0, H)
    if FMT == "nvfp4":
        low_codes, low_scale = nvfp4_block(lo, tensor_scale, H)
        high_codes, high_scale = nvfp4_block(hi, tensor_scale, H)
        tl.store(plane + row * H + i, (low_codes | (high_codes << 4)).to(tl.uint8))
        j = tl.arange(0, H // 16)
        tl.store(scales + row * (D // 16) + j, low_scale)
        tl.store(scales + row * (D // 16) + H // 16 + j, high_scale)
    else:
        if FMT == "fp8":
            scale = row_scale(tl.maximum(tl.max(tl.abs(lo), 0), tl.max(tl.abs(hi), 0)), 448.0)
            low, high = e4m3_codes(lo, scale), e4m3_codes(hi, scale)
            tl.store(scales + row, scale)
        elif FMT == "int8":
            scale = row_scale(tl.maximum(tl.max(tl.abs(lo), 0), tl.max(tl.abs(hi), 0)), 127.0)
            low, high = int8_codes(lo, scale), int8_codes(hi, scale)
            tl.store(scales + row, scale)
        else:
            low, high = lo.to(plane.dtype.element_ty), hi.to(plane.dtype.element_ty)
        if TRANSPOSED:
            at = plane + row // P * (P * D) + row % P
            tl.store(at + i * P, low)
            tl.store(at + (i + H) * P, high)
        else:
            tl.store(plane + row * D + i, low)
            tl.store(plane + row * D + H + i, high)


@triton.jit
def kv_append_kernel(
    k_plane, v_plane, k_scales, v_scales, k, v, cos, sin, slots, k_factor, v_factor, stride_k, stride_v, KVH,
    D: tl.constexpr, P: tl.constexpr, FMT: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Program (token, KV head). ``k``, ``v`` [T, H, D]; ``cos``, ``sin`` fp32 [T, D], the sine's first half
    negated; ``slots`` int64 [T], negative ones are skipped; planes seen as rows [pages * H * P, ...]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        H: tl.constexpr = D // 2
        i = tl.arange(0, H)
        row = (slot // P * KVH + head) * P + slot % P
        at = k + token * stride_k + head * D + i
        lo, hi = tl.load(at).to(tl.float32), tl.load(at + H).to(tl.float32)
        if ROPE:
            turn = token * D + i
            low = hi * tl.load(sin + turn) + lo * tl.load(cos + turn)
            high = lo * tl.load(sin + turn + H) + hi * tl.load(cos + turn + H)
            # What an unquantized cache would hold is what is encoded.
            lo = low.to(k.dtype.element_ty).to(tl.float32)
            hi = high.to(k.dtype.element_ty).to(tl.float32)
        _write(k_plane, k_scales, lo, hi, row, k_factor, D, P, FMT, False)
        at = v + token * stride_v + head * D + i
        lo, hi = tl.load(at).to(tl.float32), tl.load(at + H).to(tl.float32)
        _write(v_plane, v_scales, lo, hi, row, v_factor, D, P, FMT, FMT == "fp8")


@triton.jit
def kivi_keys_kernel(
    codes, minimum, step, source, rows, pages, KVH,
    D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Program (page, KV head, key group): per channel over GROUP tokens.

    ``source`` [rows, H, P, D]: page ``n`` of ``pages`` (int64) is encoded from row ``rows[n]`` (int64).
    """
    PARTS: tl.constexpr = 8 // BITS
    SIZE: tl.constexpr = GROUP // PARTS
    n, head, group = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, D)
    first = ((tl.load(rows + n) * KVH + head) * P + group * GROUP) * D
    t = tl.arange(0, GROUP)
    x = tl.load(source + first + t[:, None] * D + d[None, :]).to(tl.float32)
    low, width = affine(tl.min(x, 0), tl.max(x, 0), (1 << BITS) - 1)
    code = affine_codes(x, low[None, :], width[None, :], (1 << BITS) - 1)
    parts = tl.reshape(code, [PARTS, SIZE, D]) << (tl.arange(0, PARTS) * BITS)[:, None, None]
    block = (tl.load(pages + n) * KVH + head) * (P // GROUP) + group
    i = tl.arange(0, SIZE)
    tl.store(codes + (block * SIZE + i[:, None]) * D + d[None, :], tl.sum(parts, 0).to(tl.uint8))
    tl.store(minimum + block * D + d, low)
    tl.store(step + block * D + d, width)


@triton.jit
def kivi_values_kernel(
    codes, minimum, step, source, rows, pages, KVH,
    D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Program (page, KV head, block of BR byte rows): per token over GROUP channels."""
    PARTS: tl.constexpr = 8 // BITS
    R: tl.constexpr = P // PARTS
    C: tl.constexpr = D // GROUP
    n, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    d, c = tl.arange(0, D), tl.arange(0, C)
    i = block * BR + tl.arange(0, BR)
    t = tl.reshape((tl.arange(0, PARTS) * R)[:, None] + i[None, :], [PARTS * BR])
    first = (tl.load(rows + n) * KVH + head) * P
    x = tl.load(source + (first + t[:, None]) * D + d[None, :]).to(tl.float32)
    grouped = tl.reshape(x, [PARTS * BR, C, GROUP])
    low, width = affine(tl.min(grouped, 2), tl.max(grouped, 2), (1 << BITS) - 1)
    code = affine_codes(grouped, low[:, :, None], width[:, :, None], (1 << BITS) - 1)
    parts = tl.reshape(code, [PARTS, BR, D]) << (tl.arange(0, PARTS) * BITS)[:, None, None]
    page = tl.load(pages + n) * KVH + head
    tl.store(codes + (page * R + i[:, None]) * D + d[None, :], tl.sum(parts, 0).to(tl.uint8))
    at = (page * P + t[:, None]) * C + c[None, :]
    tl.store(minimum + at, low)
    tl.store(step + at, width)
