"""W8A8: y = (x_q W_q^T) * x_scale[m] * w_scale[n], INT8 codes, exact INT32 sums, scales at the end.

SmoothQuant's linear (arXiv 2211.10438): activations per token (``quantize_rows``, with its factors where no
norm absorbed them), weights per output row. The sum of integers does not depend on its order, so tiles,
splits of K and batches give the same bits, and only the last two multiplications round. For few tokens the
operands change places: 64 weight rows ride in the M of wgmma, 16 tokens in its N.

Layout: int8 [M, K] and [N, K], inputs last; float32 scales. Operations 2 M N K. Bytes N K + M K + 2 M N and
the scales. K up to 131,072, where 127 * 127 * K still fits 32 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from workbench.kernels.layouts.w8 import W8
from workbench.kernels.linear.operands import (
    FLOATS,
    check_dense,
    check_device,
    check_rows,
    check_shape,
    processors,
)
from workbench.kernels.linear.split import choose_split, partial_rows
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import UnsupportedInput

LONGEST = 131072


def reference(codes: Tensor, scales: Tensor, weight: W8, dtype: torch.dtype = torch.float64) -> Tensor:
    """The product [M, N] in ``dtype`` of the integers, exact below 2^53, and both scales."""
    return (
        (codes.to(dtype) @ weight.codes.to(dtype).t()) * scales.to(dtype)[:, None] * weight.scales.to(dtype)
    )


@triton.jit
def _scaled(acc, m_scales, n_scales, ms, ns, M, N):
    """INT32 sums [BN, BM] or [BM, BN] times both scales, in float32; ``ms`` and ``ns`` are shaped to fit."""
    m = tl.load(m_scales + ms, mask=ms < M, other=0.0)
    n = tl.load(n_scales + ns, mask=ns < N, other=0.0)
    return acc.to(tl.float32) * m * n


@triton.jit
def w8a8_kernel(x, w, y, x_scales, w_scales, m_rows, M, N, blocks, SWAP: tl.constexpr, SPLIT: tl.constexpr,
                BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One tile of y over one part of K; with SPLIT > 1 the INT32 sums themselves."""
    # Neighbouring programs share weight rows: they run over the tokens first.
    m0, n0, part = tl.program_id(0) * BM, tl.program_id(1) * BN, tl.program_id(2)
    each = tl.cdiv(blocks, SPLIT)
    first = part * each
    last = tl.minimum(first + each, blocks)
    if SWAP:
        acc = tl.zeros((BN, BM), tl.int32)
        for b in range(first, last):
            acc = tl.dot(w.load([n0, b * BK]), x.load([m0, b * BK]).T, acc, out_dtype=tl.int32)
        acc = acc.T
    else:
        acc = tl.zeros((BM, BN), tl.int32)
        for b in range(first, last):
            acc = tl.dot(x.load([m0, b * BK]), w.load([n0, b * BK]).T, acc, out_dtype=tl.int32)
    if SPLIT > 1:
        y.store([part * m_rows + m0, n0], acc)
    else:
        ms, ns = m0 + tl.arange(0, BM)[:, None], n0 + tl.arange(0, BN)[None, :]
        y.store([m0, n0], _scaled(acc, x_scales, w_scales, ms, ns, M, N).to(y.dtype))


@triton.jit
def scale_parts_kernel(parts, y, x_scales, w_scales, part_stride, M, N,
                       SPLIT: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add the INT32 parts of one row and scale the sum."""
    m = tl.program_id(0)
    ns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    where = m.to(tl.int64) * N + ns
    acc = tl.load(parts + where, mask=ns < N, other=0)
    for _ in tl.static_range(1, SPLIT):
        parts += part_stride
        acc += tl.load(parts + where, mask=ns < N, other=0)
    out = _scaled(acc, x_scales, w_scales, m, ns, M, N)
    tl.store(y + where, out.to(y.dtype.element_ty), mask=ns < N)


def _build(name: str, swap: bool, split: int, bm: int, bn: int, bk: int, warps: int, regs: int) -> Build:
    out = "i32" if split > 1 else "bf16"
    signature = {"x": f"tensordesc<i8[{bm},{bk}]>", "w": f"tensordesc<i8[{bn},{bk}]>"}
    signature |= {"y": f"tensordesc<{out}[{bm},{bn}]>", "x_scales": "*fp32", "w_scales": "*fp32"}
    signature |= dict.fromkeys(("m_rows", "M", "N", "blocks"), "i32")
    # INT8 wgmma shows as IGMMA, one per 32 inputs; nothing is widened before the sum is complete.
    sass = {"IGMMA": Bound(bk // 32, bk // 32), "IMMA": Bound(0, 0), "HGMMA": Bound(0, 0)}
    sass |= {"UTMALDG": Bound(4), "UTMASTG": Bound(1), "WARPGROUP": Bound(0, 4), "LDL": Bound(0, 0)}
    sass |= {"STL": Bound(0, 0), "stack": Bound(0, 0), "regs": Bound(0, regs), "warnings": Bound(0, 0)}
    return Build(name, signature, {"SWAP": swap, "SPLIT": split, "BM": bm, "BN": bn, "BK": bk}, warps,
                 4 if swap else 3, ("x_scales", "w_scales"), sass)  # fmt: skip


BUILDS = (
    _build("decode, weights in M", True, 1, 16, 64, 128, 4, 64),
    _build("decode, weights in M, split 4", True, 4, 16, 64, 128, 4, 64),
    _build("prefill 128 x 128", False, 1, 128, 128, 128, 8, 128),
)


def cost(M: int, N: int, K: int, **_: object) -> Cost:
    """Work of one product: both operands as bytes, 16-bit results, float32 scales."""
    return Cost(2 * M * N * K, N * K + M * K + 2 * M * N + 4 * (M + N))


KERNEL = Kernel(
    "w8a8", "INT8 weights per row, INT8 activations per token", "triton", "SmoothQuant (arXiv 2211.10438)",
    w8a8_kernel, BUILDS, cost,
)  # fmt: skip


def w8a8(
    codes: Tensor, scales: Tensor, weight: W8, *, dtype: torch.dtype = torch.bfloat16, split: int = 0
) -> Tensor:
    """INT8 ``codes`` [M, K] with float32 ``scales`` [M] times the weights, transposed: [M, N] in ``dtype``.

    ``split`` cuts K into parts (0: by shape and device); the result is the same to the bit. Runs on CUDA, or
    in the interpreter. Raises :class:`UnsupportedInput` for another dtype, strides TMA cannot read (K must
    be a multiple of 16, N of 8), sizes that do not match, or K beyond 131,072.
    """
    m, (n, k) = codes.shape[0], weight.codes.shape
    check_device("w8a8", codes, scales, weight.codes, weight.scales)
    check_rows("w8a8", "codes", codes, (torch.int8,))
    check_rows("w8a8", "weight.codes", weight.codes, (torch.int8,))
    for name, tensor, size in (("scales", scales, m), ("weight.scales", weight.scales, n)):
        check_dense("w8a8", name, tensor, (torch.float32,))
        check_shape("w8a8", name, tensor, (size,))
    if codes.shape[1] != k or k > LONGEST or n % 8 or dtype not in FLOATS or split < 0:
        raise UnsupportedInput(
            f"w8a8: codes {tuple(codes.shape)} against weights {(n, k)} to {dtype}, split {split}.",
            hint=f"K must match and be at most {LONGEST}, N a multiple of 8, the result bf16 or fp16.",
        )
    y = torch.empty(m, n, dtype=dtype, device=codes.device)
    if m == 0:
        return y
    swap = m <= 32
    bm, bn, warps = (16 if m <= 16 else 32, 64, 4) if swap else (128, 128, 8)
    grid_m, grid_n, blocks = triton.cdiv(m, bm), triton.cdiv(n, bn), triton.cdiv(k, 128)
    split = min(split or choose_split(grid_n * grid_m, k, processors(codes.device)), blocks)
    rows = partial_rows(m, bm, split)
    out = y if split == 1 else torch.empty(split * rows, n, dtype=torch.int32, device=y.device)
    w8a8_kernel[(grid_m, grid_n, split)](
        TensorDescriptor.from_tensor(codes, [bm, 128]),
        TensorDescriptor.from_tensor(weight.codes, [bn, 128]),
        TensorDescriptor.from_tensor(out, [bm, bn]),
        scales, weight.scales, rows, m, n, blocks,
        SWAP=swap, SPLIT=split, BM=bm, BN=bn, BK=128, num_warps=warps, num_stages=4 if swap else 3,
    )  # fmt: skip
    if split > 1:
        scale_parts_kernel[(m, triton.cdiv(n, 1024))](
            out, y, scales, weight.scales, rows * n, m, n, SPLIT=split, BLOCK=1024
        )
    return y
