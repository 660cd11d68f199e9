"""Block-scaled FP8 GEMM: y = x W^T, E4M3 operands, scales per 1 x 128 of x and per 128 x 128 of W.

    y[m, n] = sum_g  x_scale[g, m] * w_scale[n / 128, g] * sum_{k in g} x[m, k] w[n, k],   g = 128 inputs

DeepSeek-V3's linear (arXiv 2412.19437, section 3.3.2). Hopper's FP8 tensor cores keep about 14 bits of a
long sum, so each group of 128 is summed from zero and promoted: scaled and added to a float32 accumulator in
ordinary registers. That is where the block scales come in for free. The grid is persistent: as many programs
as processors, each walking over tiles in an order in which neighbours share operands in L2, the loads of the
next tile issued under the stores of this one.

Layout: E4M3 [M, K] and [N, K], inputs last; x_scale [K / 128, M] and w_scale [N / 128, K / 128] float32, as
``quantize_rows`` and ``workbench.kernels.layouts.w8`` make them. FLOPs 2 M N K. Bytes M K + N K + 2 M N.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from workbench.kernels.layouts.w8 import BLOCK, FP8Blocks
from workbench.kernels.linear.operands import (
    FLOATS,
    check_dense,
    check_device,
    check_rows,
    check_shape,
    processors,
)
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.numerics.e4m3 import from_e4m3
from workbench.spec.errors import UnsupportedInput


def reference(codes: Tensor, scales: Tensor, weight: FP8Blocks, dtype: torch.dtype = torch.float64) -> Tensor:
    """The product [M, N] of the stored values in ``dtype``."""
    x = from_e4m3(codes).to(dtype) * scales.to(dtype).t().repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return x @ weight.values(dtype).t()


@triton.jit
def gemm_fp8_block_kernel(x, w, y, x_scales, w_scales, M, N, groups,
                          PROGRAMS: tl.constexpr, BAND: tl.constexpr, BM: tl.constexpr,
                          BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """Tiles [BM, BN] of y, one program after another; BN divides 128, so one weight scale serves a tile."""
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        # Bands of BAND tile rows, column by column: about as many rows of x as of W are in use at a time.
        band = tile // (BAND * tiles_n) * BAND
        rows = tl.minimum(tiles_m - band, BAND)
        m0 = (band + tile % (BAND * tiles_n) % rows) * BM
        n0 = tile % (BAND * tiles_n) // rows * BN
        ms = m0 + tl.arange(0, BM)
        acc = tl.zeros((BM, BN), tl.float32)
        for g in range(groups):
            scale = tl.load(x_scales + g * M + ms, mask=ms < M, other=0.0)
            scale *= tl.load(w_scales + n0 // 128 * groups + g)
            acc += tl.dot(x.load([m0, g * BK]), w.load([n0, g * BK]).T) * scale[:, None]
        y.store([m0, n0], acc.to(y.dtype))


def _build(name: str, bm: int, bn: int, stages: int, warps: int, regs: int) -> Build:
    signature = {"x": f"tensordesc<fp8e4nv[{bm},{BLOCK}]>", "w": f"tensordesc<fp8e4nv[{bn},{BLOCK}]>"}
    signature |= {"y": f"tensordesc<bf16[{bm},{bn}]>", "x_scales": "*fp32", "w_scales": "*fp32"}
    signature |= dict.fromkeys(("M", "N", "groups"), "i32")
    constants = {"PROGRAMS": 132, "BAND": 8, "BM": bm, "BN": bn, "BK": BLOCK}
    # One QGMMA per 32 inputs, two TMA loads per stage, and every product starts from zero (no HGMMA: nothing
    # was widened to 16 bits).
    sass = {"QGMMA": Bound(4, 4), "HGMMA": Bound(0, 0), "HMMA": Bound(0, 0), "WARPGROUP": Bound(0, 4)}
    sass |= {"UTMALDG": Bound(2 * stages, 2 * stages), "UTMASTG": Bound(1), "LDL": Bound(0, 0)}
    sass |= {"STL": Bound(0, 0), "stack": Bound(0, 0), "regs": Bound(0, regs), "warnings": Bound(0, 0)}
    sass["smem"] = Bound(0, 232_448)
    return Build(name, signature, constants, warps, stages, ("x_scales", "w_scales"), sass)


BUILDS = (
    _build("prefill 128 x 128", 128, 128, 3, 8, 170),
    _build("decode 64 x 64", 64, 64, 4, 4, 110),
)


def cost(M: int, N: int, K: int, **_: object) -> Cost:
    """Work of one product: both operands as bytes, 16-bit results, scales."""
    return Cost(2 * M * N * K, (M + N) * K + 2 * M * N + 4 * (K // BLOCK) * (M + N // BLOCK))


KERNEL = Kernel(
    "gemm_fp8_block", "FP8 GEMM with 1 x 128 and 128 x 128 scales", "triton",
    "DeepSeek-V3 (arXiv 2412.19437)", gemm_fp8_block_kernel, BUILDS, cost,
)  # fmt: skip


def gemm_fp8_block(
    codes: Tensor, scales: Tensor, weight: FP8Blocks, *, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """E4M3 ``codes`` [M, K], float32 ``scales`` [ceil(K / 128), M] times the weights: [M, N] in ``dtype``.

    Runs on CUDA (compute capability 8.9 or above), or in the interpreter. Raises :class:`UnsupportedInput`
    for another dtype, strides TMA cannot read (K must be a multiple of 16, N of 8), sizes that do not match,
    or an older GPU.
    """
    m, (n, k) = codes.shape[0], weight.codes.shape
    check_device("gemm_fp8_block", codes, scales, weight.codes, weight.scales)
    check_rows("gemm_fp8_block", "codes", codes, (torch.float8_e4m3fn,))
    check_rows("gemm_fp8_block", "weight.codes", weight.codes, (torch.float8_e4m3fn,))
    groups = triton.cdiv(k, BLOCK)
    for name, tensor, shape in (
        ("scales", scales, (groups, m)),
        ("weight.scales", weight.scales, (triton.cdiv(n, BLOCK), groups)),
    ):
        check_dense("gemm_fp8_block", name, tensor, (torch.float32,))
        check_shape("gemm_fp8_block", name, tensor, shape)
    if codes.shape[1] != k or n % 8 or dtype not in FLOATS:
        raise UnsupportedInput(
            f"gemm_fp8_block: codes {tuple(codes.shape)} against weights {(n, k)} to {dtype}.",
            hint="K must match, N be a multiple of 8, the result bf16 or fp16.",
        )
    if codes.is_cuda and torch.cuda.get_device_capability(codes.device) < (8, 9):
        raise UnsupportedInput(
            "gemm_fp8_block: this GPU has no FP8 tensor cores.",
            hint="Use 16-bit or INT8 weights, or a GPU of compute capability 8.9 or above.",
        )
    y = torch.empty(m, n, dtype=dtype, device=codes.device)
    if m == 0:
        return y
    bm, bn, stages, warps = (64, 64, 4, 4) if m <= 64 else (128, 128, 3, 8)
    programs = min(processors(codes.device), triton.cdiv(m, bm) * triton.cdiv(n, bn))
    gemm_fp8_block_kernel[(programs,)](
        TensorDescriptor.from_tensor(codes, [bm, BLOCK]),
        TensorDescriptor.from_tensor(weight.codes, [bn, BLOCK]),
        TensorDescriptor.from_tensor(y, [bm, bn]),
        scales, weight.scales, m, n, groups,
        PROGRAMS=programs, BAND=8, BM=bm, BN=bn, BK=BLOCK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y
