"""FP4 weights, 16-bit activations: y = x W^T with NVFP4 or MXFP4 weights.

    y[m, n] = row_scale[n] * sum_k  code[n, k] * block_scale[n, k / block] * x[m, k]

Hopper has no FP4 units: codes become bfloat16 (or float16) in registers, and the saving is memory. An E2M1
code needs no table: its sign in bit 15 and its other three bits at the bottom of the exponent are the value
times 2^-126 (bfloat16) or 2^-14 (float16), subnormal included; the block scale, multiplied by the missing
power but 2^7, puts it right in one multiplication. Code times E4M3 has six significant bits, code times E8M0
two: the weights are exact in 16 bits, and one long float32 sum follows. Weight rows ride in the M of wgmma.

Layout: ``workbench.kernels.layouts.fp4``. FLOPs 2 M N K. Bytes N K / 2 + N K / block + 2 M (K + N).
Formats: OCP Microscaling 1.0; NVIDIA NVFP4. ``tl.dot_scaled`` would do it from triton 3.9 on only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from workbench.kernels.layouts.fp4 import FP4, HALF
from workbench.kernels.linear.operands import FLOATS, check_dense, check_device, check_rows, processors
from workbench.kernels.linear.split import add_parts, choose_split, partial_rows, workspace
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import UnsupportedInput


def reference(x: Tensor, weight: FP4, dtype: torch.dtype = torch.float64) -> Tensor:
    """``x @ W^T`` [M, N] in ``dtype``, with the stored weights."""
    return x.to(dtype) @ weight.values(dtype).t()


@triton.jit
def _factors(pointer, rows, N, column, width, COUNT: tl.constexpr, X: tl.constexpr):
    """Block scales [BN, COUNT] as floats of type X, times what a code's bits lack but 2^7."""
    columns = column + tl.arange(0, COUNT)[None, :]
    raw = tl.load(pointer + rows[:, None] * width + columns, mask=(rows < N)[:, None] & (columns < width))
    if raw.dtype == tl.uint8:
        return (raw.to(tl.uint16) << 7).to(X, bitcast=True)  # the layout has already moved the exponent
    POWER: tl.constexpr = 2.0**119 if X == tl.bfloat16 else 2.0**7  # noqa: SIM300
    return (raw.to(tl.float32) * POWER).to(X)


@triton.jit
def _weights(codes, factors, X: tl.constexpr):
    """Codes [BN, HALF] times their blocks' factors [BN, HALF / block], exactly."""
    BN: tl.constexpr = codes.shape[0]
    HALF: tl.constexpr = codes.shape[1]
    COUNT: tl.constexpr = factors.shape[1]
    SHIFT: tl.constexpr = 6 if X == tl.bfloat16 else 9  # noqa: SIM300
    bits = codes.to(tl.uint16)
    tiny = (((bits & 7) << SHIFT) | ((bits & 8) << 12)).to(X, bitcast=True)
    return (tiny.reshape(BN, COUNT, HALF // COUNT) * factors[:, :, None]).reshape(BN, HALF)


@triton.jit
def fp4_gemm_kernel(x, codes, y, scales, row_scale, m_rows, N, width, blocks,
                    MX: tl.constexpr, HALF: tl.constexpr, SPLIT: tl.constexpr,
                    BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """One [BN, BM] tile of y^T over one part of K."""
    X: tl.constexpr = x.dtype
    n0, m0, part = tl.program_id(0) * BN, tl.program_id(1) * BM, tl.program_id(2)
    rows = n0 + tl.arange(0, BN)
    each = tl.cdiv(blocks, SPLIT)
    first = part * each
    last = tl.minimum(first + each, blocks)
    COUNT: tl.constexpr = HALF // 32 if MX else HALF // 16
    acc = tl.zeros((BN, BM), tl.float32)
    # Scales of the next tile are requested before this tile is multiplied.
    f0 = _factors(scales, rows, N, first * 2 * COUNT, width, COUNT, X)
    f1 = _factors(scales, rows, N, first * 2 * COUNT + COUNT, width, COUNT, X)
    for b in range(first, last):
        packed = codes.load([n0, b * HALF])
        x0, x1 = x.load([m0, b * 2 * HALF]), x.load([m0, b * 2 * HALF + HALF])
        after = (b + 1) * 2 * COUNT
        next_f0 = _factors(scales, rows, N, after, width, COUNT, X)
        next_f1 = _factors(scales, rows, N, after + COUNT, width, COUNT, X)
        w0, w1 = _weights(packed & 15, f0, X), _weights(packed >> 4, f1, X)
        # A sum per tile of K: a long accumulator carried in flight makes ptxas serialise the wgmma.
        acc += tl.dot(w1, x1.T, tl.dot(w0, x0.T))
        f0, f1 = next_f0, next_f1
    row = tl.load(row_scale + rows, mask=rows < N, other=0.0)
    if not MX:
        row = row * 128.0
    y.store([part * m_rows + m0, n0], (acc * row[:, None]).T.to(y.dtype))


def _build(name: str, mx: bool, split: int, bm: int, bn: int, *, kind: str = "bf16", warps: int = 4,
           regs: int = 96) -> Build:  # fmt: skip
    out = "fp32" if split > 1 else kind
    signature = {"x": f"tensordesc<{kind}[{bm},{HALF}]>", "codes": f"tensordesc<u8[{bn},{HALF}]>"}
    signature |= {"y": f"tensordesc<{out}[{bm},{bn}]>", "scales": "*u8" if mx else "*fp8e4nv"}
    signature |= {"row_scale": "*fp32", **dict.fromkeys(("m_rows", "N", "width", "blocks"), "i32")}
    # 8 HGMMA of K = 16 for 128 inputs with A from registers, and one packed multiplication per two weights
    # (32 HMUL2 on 64 x 128): nothing is converted through float32 but the scales.
    sass = {"HGMMA": Bound(8, 8), "HMMA": Bound(0, 0), "I2F": Bound(0, 0), "LDS.U8": Bound(0, 0)}
    sass |= {"HMUL2": Bound(32, 44), "UTMALDG": Bound(3), "UTMASTG": Bound(1), "WARPGROUP": Bound(0, 6)}
    sass |= {"LDL": Bound(0, 0), "STL": Bound(0, 0), "stack": Bound(0, 0), "regs": Bound(0, regs)}
    sass |= {"PRMT": Bound(0, 200), "warnings": Bound(0, 0)}
    return Build(name, signature, {"MX": mx, "HALF": HALF, "SPLIT": split, "BM": bm, "BN": bn}, warps,
                 4 if bm == 16 else 3, ("scales", "row_scale", "N"), sass)  # fmt: skip


BUILDS = (
    _build("nvfp4 decode, split 4", False, 4, 16, 64),
    _build("nvfp4 decode, fp16", False, 1, 16, 64, kind="fp16"),
    _build("mxfp4 decode", True, 1, 16, 64),
    _build("nvfp4 prefill 64 x 128", False, 1, 64, 128, warps=8, regs=152),
)


def cost(M: int, N: int, K: int, block: int = 16, **_: object) -> Cost:
    """Work of one product: codes and one byte of scale per block once, activations in and out."""
    return Cost(2 * M * N * K, N * K // 2 + N * (K // block) + 4 * N + 2 * M * (K + N))


KERNEL = Kernel(
    "fp4_gemm", "FP4 weights, 16-bit activations", "triton", "OCP Microscaling 1.0, NVFP4",
    fp4_gemm_kernel, BUILDS, cost,
)  # fmt: skip


def fp4_gemm(x: Tensor, weight: FP4, *, split: int = 0) -> Tensor:
    """``x`` [M, K] times the stored weights, transposed: [M, N] in x's dtype.

    x is bf16, or fp16 with NVFP4 (E8M0 scales reach beyond float16). ``split`` cuts K into parts that are
    added in order (0: by shape and device). Runs on CUDA, or in the interpreter. Raises
    :class:`UnsupportedInput` for another dtype, strides TMA cannot read, N not a multiple of 8, or sizes
    that do not match.
    """
    m, n, k, mx = x.shape[0], weight.n, weight.k, weight.block == 32
    check_device("fp4_gemm", x, weight.codes, weight.scales, weight.row_scale)
    check_rows("fp4_gemm", "x", x, (torch.bfloat16,) if mx else FLOATS)
    check_rows("fp4_gemm", "codes", weight.codes, (torch.uint8,))
    check_dense("fp4_gemm", "scales", weight.scales, (torch.uint8, torch.float8_e4m3fn))
    if x.shape[1] != k or n % 8 or split < 0:
        raise UnsupportedInput(
            f"fp4_gemm: x {tuple(x.shape)} against weights {(n, k)}, split {split}.",
            hint="x must have as many columns as the weights inputs; N must be a multiple of 8.",
        )
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    bm, bn, warps = (16, 64, 4) if m <= 16 else (32, 64, 4) if m <= 32 else (64, 128, 8)
    blocks = weight.codes.shape[1] // HALF
    grid_n, grid_m = triton.cdiv(n, bn), triton.cdiv(m, bm)
    split = min(split or choose_split(grid_n * grid_m, k, processors(x.device)), blocks)
    rows = partial_rows(m, bm, split)
    out = workspace(y, rows, split)
    fp4_gemm_kernel[(grid_n, grid_m, split)](
        TensorDescriptor.from_tensor(x, [bm, HALF]),
        TensorDescriptor.from_tensor(weight.codes, [bn, HALF]),
        TensorDescriptor.from_tensor(out, [bm, bn]),
        weight.scales, weight.row_scale, rows, n, weight.scales.shape[1], blocks,
        MX=mx, HALF=HALF, SPLIT=split, BM=bm, BN=bn, num_warps=warps, num_stages=4 if bm == 16 else 3,
    )  # fmt: skip
    if split > 1:
        add_parts(out, y, rows, split)
    return y
