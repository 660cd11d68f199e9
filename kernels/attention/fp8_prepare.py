"""Incoherent processing and block quantization to E4M3 of Q, K and V, for ``fa3_fwd_fp8``.

    Q' = Q diag(s) H / sqrt(D),  K' = K diag(s) H / sqrt(D)  with random signs s and a Hadamard matrix H

leaves Q K^T as it is and spreads outliers over the head dim (arXiv 2407.08608, section 3.3; 2307.13304). Q
and K come after RoPE. Then every block of 128 tokens of a head gets one scale, amax / 448, and V is written
transposed in the token order that the product wants. FLOPs: 2 D per element of Q and K; bytes: 2 read and 1
written per element. Only rows within a sequence are read; slots behind its end become zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.kernels.attention.fp8_blocks import BLOCK, E4M3, Fp8Blocks, packed_blocks, packed_table
from workbench.kernels.attention.problem import checked
from workbench.kernels.checks import require, require_dtype, require_runnable
from workbench.kernels.layouts import permute
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.numerics.e4m3 import LARGEST, to_e4m3
from workbench.numerics.hadamard import hadamard, random_signs

__all__ = ["BUILDS", "KERNELS", "fp8_prepare", "random_signs", "reference"]

TOP = tl.constexpr(LARGEST)


def rotated(x: Tensor, signs: Tensor | None) -> Tensor:
    """``x diag(signs) H / sqrt(D)`` in float32, H the Sylvester Hadamard matrix; x itself without signs."""
    if signs is None:
        return x.float()
    dim = x.shape[-1]
    return (x.float() * signs) @ hadamard(dim).float() * dim**-0.5


def reference(
    q: Tensor, k: Tensor, v: Tensor, q_lens: Sequence[int], kv_lens: Sequence[int], signs: Tensor | None,
    *, per_tensor: bool = False,
) -> Fp8Blocks:  # fmt: skip
    """The same in plain torch; ``per_tensor`` gives each of Q, K, V a single scale: the usual baseline."""
    blocks_q, blocks_k = packed_blocks(q_lens), packed_blocks(kv_lens)
    q, k, v = rotated(q, signs), rotated(k, signs), v.float()

    def quantized(x: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        tiles = torch.zeros(len(blocks), x.shape[1], BLOCK, x.shape[2])
        for tile, (row, rows) in zip(tiles, blocks.tolist(), strict=True):
            tile[:, :rows] = x[row : row + rows].transpose(0, 1)
        amax = tiles.abs().amax((2, 3))
        amax = amax.max().expand_as(amax) if per_tensor else amax
        scale = torch.where(amax > 0, amax / LARGEST, 1.0).contiguous()
        return to_e4m3(tiles / scale[:, :, None, None]), scale

    codes, q_scale = quantized(q, blocks_q)
    rows = [codes[i, :, :n].transpose(0, 1) for i, n in enumerate(blocks_q[:, 1].tolist())]
    k8, k_scale = quantized(k, blocks_k)
    v8, v_scale = quantized(v, blocks_k)
    v8 = permute.permute(v8.mT.contiguous())
    packed = torch.cat([r.contiguous().view(torch.uint8) for r in rows]).view(E4M3)
    return Fp8Blocks(
        packed, q_scale, k8, k_scale, v8, v_scale, packed_table(kv_lens), tuple(q_lens), tuple(kv_lens)
    )


@triton.jit
def _codes(x):
    """E4M3 codes of a tile, and its scale."""
    amax = tl.max(tl.max(tl.abs(x), 1), 0)
    scale = tl.where(amax > 0.0, amax / TOP, 1.0)
    return (x / scale).to(tl.float8e4nv), scale


@triton.jit(do_not_specialize=("heads",))
def fp8_rows_kernel(
    x_ptr, sign_ptr, block_ptr, out_ptr, scale_ptr, heads, x_row, x_head,
    ROTATE: tl.constexpr, PACKED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one head of Q (PACKED: row after row) or K (block after block)."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(block_ptr + block * 2)
    rows = tl.load(block_ptr + block * 2 + 1)
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    at = x_ptr + (row + i).to(tl.int64)[:, None] * x_row + head.to(tl.int64) * x_head + d[None, :]
    x = tl.load(at, mask=(i < rows)[:, None], other=0.0)
    if ROTATE:
        # Entry (i, j) of the Sylvester matrix: -1 to the number of ones in i & j.
        ones = d[:, None] & d[None, :]
        ones = ones ^ (ones >> 4)
        ones = ones ^ (ones >> 2)
        ones = (ones ^ (ones >> 1)) & 1
        signs = tl.load(sign_ptr + d)
        matrix = (1.0 - 2.0 * ones.to(tl.float32)) * signs[:, None]
        y = tl.dot(x, matrix.to(x.dtype), input_precision="ieee") * (1.0 / (D**0.5))
    else:
        y = x.to(tl.float32)
    codes, scale = _codes(y)
    if PACKED:
        to = (row + i).to(tl.int64)[:, None] * (heads * D) + head * D + d[None, :]
        tl.store(out_ptr + to, codes, mask=(i < rows)[:, None])
    else:
        to = (block.to(tl.int64) * heads + head) * (BLOCK * D) + i[:, None] * D + d[None, :]
        tl.store(out_ptr + to, codes)
    tl.store(scale_ptr + block * heads + head, scale)


@triton.jit(do_not_specialize=("heads",))
def fp8_values_kernel(
    x_ptr, block_ptr, out_ptr, scale_ptr, heads, x_row, x_head, D: tl.constexpr, BLOCK: tl.constexpr
):
    """One block of one head of V, transposed: token 16j + 8h + 2t + e at column 16j + 4t + 2h + e."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(block_ptr + block * 2)
    rows = tl.load(block_ptr + block * 2 + 1)
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    at = x_ptr + (row + i).to(tl.int64)[:, None] * x_row + head.to(tl.int64) * x_head + d[None, :]
    codes, scale = _codes(tl.load(at, mask=(i < rows)[:, None], other=0.0).to(tl.float32))
    codes = tl.reshape(codes, [BLOCK // 16, 2, 4, 2, D])
    codes = tl.reshape(tl.permute(codes, [4, 0, 2, 1, 3]), [D, BLOCK])
    to = (block.to(tl.int64) * heads + head) * (BLOCK * D) + d[:, None] * BLOCK + i[None, :]
    tl.store(out_ptr + to, codes)
    tl.store(scale_ptr + block * heads + head, scale)


def fp8_prepare(
    q: Tensor, k: Tensor, v: Tensor, q_lens: Sequence[int], kv_lens: Sequence[int], signs: Tensor | None
) -> Fp8Blocks:
    """Quantize packed q [Tq, Hq, D], k and v [Tk, Hkv, D]; ``signs`` float32 [D], or None for no rotation.

    Raises ``UnsupportedInput`` unless they are bf16 or fp16 with D = 64 or 128 and a contiguous last axis, on
    a GPU or interpreted; ``CompilerError`` for a triton outside the tested range.
    """
    checked(q, k, v, q_lens, kv_lens)
    dim = q.shape[2]
    require_runnable("fp8_prepare", q)
    require_dtype("q", q, (torch.bfloat16, torch.float16))
    require(
        dim in (64, 128), f"Head size {dim}.", "FP8 attention takes head sizes 64 and 128: 256 would spill."
    )
    require(
        all(x.stride(-1) == 1 for x in (q, k, v)), "The last axis must be contiguous.", "Use .contiguous()."
    )
    if signs is not None:
        require(
            signs.shape == (dim,) and signs.dtype == torch.float32 and bool((signs.abs() == 1).all()),
            f"signs are {signs.dtype} {tuple(signs.shape)}.",
            f"They are ±1, float32 [{dim}]: use random_signs({dim}, seed).",
        )
        signs = signs.to(q.device)
    blocks_q, blocks_k = packed_blocks(q_lens).to(q.device), packed_blocks(kv_lens).to(q.device)
    q8 = torch.empty(q.shape, dtype=E4M3, device=q.device)
    k8 = torch.empty((len(blocks_k), k.shape[1], BLOCK, dim), dtype=E4M3, device=q.device)
    v8 = torch.empty((len(blocks_k), k.shape[1], dim, BLOCK), dtype=E4M3, device=q.device)
    q_scale, k_scale, v_scale = (
        torch.empty((len(b), x.shape[1]), device=q.device)
        for b, x in ((blocks_q, q), (blocks_k, k), (blocks_k, v))
    )
    for x, out, scale, blocks, packed in (
        (q, q8, q_scale, blocks_q, True),
        (k, k8, k_scale, blocks_k, False),
    ):
        if len(blocks):
            fp8_rows_kernel[(len(blocks), x.shape[1])](
                x, q_scale if signs is None else signs, blocks, out, scale,
                x.shape[1], x.stride(0), x.stride(1),
                ROTATE=signs is not None, PACKED=packed, D=dim, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    if len(blocks_k):
        fp8_values_kernel[(len(blocks_k), v.shape[1])](
            v, blocks_k, v8, v_scale, v.shape[1], v.stride(0), v.stride(1), D=dim, BLOCK=BLOCK, num_warps=4
        )
    table = packed_table(kv_lens).to(q.device)
    return Fp8Blocks(q8, q_scale, k8, k_scale, v8, v_scale, table, tuple(q_lens), tuple(kv_lens))


def cost(rows: int, heads: int, dim: int, rotate: bool = True) -> Cost:
    """2 D FLOPs per rotated element; 2 bytes read and 1 written per element, 4 per block and head."""
    elements = rows * heads * dim
    return Cost(2 * dim * elements if rotate else 0, 3 * elements + 4 * heads * -(-rows // BLOCK))


def build(name: str, dim: int, *, values: bool = False, **changed: Any) -> Build:
    """One configuration; a rotation is an asynchronous product, and nothing spills."""
    pointers = {"x_ptr": "*bf16", "block_ptr": "*i32", "out_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    pointers |= {} if values else {"sign_ptr": "*fp32"}
    constants: dict[str, object] = {"D": dim, "BLOCK": BLOCK, **({} if values else changed)}
    rotates = bool(changed.get("ROTATE"))
    return Build(
        name=name,
        signature={**pointers, **dict.fromkeys(["heads", "x_row", "x_head"], "i32")},
        constants=constants,
        aligned=(*pointers, "x_row", "x_head"),
        sass={"spills": Bound(0, 0), "stack": Bound(0, 0), "HGMMA": Bound(1 if rotates else 0)},
    )


BUILDS = (
    build("q hd128 rotated", 128, ROTATE=True, PACKED=True),
    build("k hd128 rotated", 128, ROTATE=True, PACKED=False),
    build("k hd64 rotated", 64, ROTATE=True, PACKED=False),
    build("q hd128", 128, ROTATE=False, PACKED=True),
)
VALUE_BUILDS = (build("v hd128", 128, values=True), build("v hd64", 64, values=True))
SOURCE = "Shah et al., FlashAttention-3, arXiv 2407.08608, section 3.3"
KERNELS = (
    Kernel(
        "fp8_prepare_rows",
        "Rotate and quantize Q and K to FP8",
        "triton",
        SOURCE,
        fp8_rows_kernel,
        BUILDS,
        cost,
    ),
    Kernel(
        "fp8_prepare_values",
        "Quantize and transpose V to FP8",
        "triton",
        SOURCE,
        fp8_values_kernel,
        VALUE_BUILDS,
        cost,
    ),
)
