"""W4A16: y = x W^T with four-bit weights in groups of inputs and 16-bit activations.

    y[m, n] = sum_g  scale[g, n] * sum_{k in g} (code[n, k] - zero[g, n]) * x[m, k]
            ( + sum_g  centre[g, n] * sum_{k in g} x[m, k] )

The inner sum is a tensor-core product of exact small integers, the group scale multiplies it in float32: the
weights are exactly those stored, whatever the tile. Operands change places: 64 weight rows ride in the M of
wgmma and the tokens in its N, so that one token wastes no more than 16 do. A code becomes a float without a
conversion: ``0x4300 | code`` are the bits of 128 + code in bfloat16 (``0x6400``: 1024 + code in float16), and
the zero point is stored with the same offset. With ``split`` > 1 the K axis is cut; partial sums go to a
float32 workspace and are added in a fixed order. ``atomic`` adds them as they arrive instead: sums then
differ from run to run.

Layout: ``workbench.kernels.layouts.w4``. FLOPs 2 M N K. Bytes N K / 2 + 3 N K / group + 2 M (K + N).
The tile and the bit trick follow Marlin (arXiv 2408.11743) and Machete; layouts follow AWQ (2306.00978) and
GPTQ (2210.17323).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from workbench.kernels.layouts.w4 import W4
from workbench.kernels.linear.operands import FLOATS, check_dense, check_device, check_rows, processors
from workbench.kernels.linear.split import add_parts, choose_split, partial_rows, workspace
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import UnsupportedInput


def reference(x: Tensor, weight: W4, dtype: torch.dtype = torch.float64) -> Tensor:
    """``x @ W^T`` [M, N] in ``dtype``, with the stored weights."""
    return x.to(dtype) @ weight.values(dtype).t()


@triton.jit
def _integers(codes, X: tl.constexpr):
    """Codes 0..127 plus a constant, as floats: 128 in bfloat16, 1024 in float16. Differences are exact."""
    BITS: tl.constexpr = 0x4300 if X == tl.bfloat16 else 0x6400  # noqa: SIM300
    return (codes.to(tl.uint16) | BITS).to(X, bitcast=True)


@triton.jit
def _parameter(pointer, g, rows, N, groups):
    return tl.load(pointer + g * N + rows, mask=(rows < N) & (g < groups), other=0)


@triton.jit
def w4a16_kernel(x, codes, y, scales, offsets, m_rows, N, groups, blocks,
                 GROUP: tl.constexpr, HALF: tl.constexpr, OFFSET: tl.constexpr, SPLIT: tl.constexpr,
                 ATOMIC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """One [BN, BM] tile of y^T over one part of K; OFFSET is "eight", "zeros" or "centres"."""
    X: tl.constexpr = x.dtype
    n0, m0, part = tl.program_id(0) * BN, tl.program_id(1) * BM, tl.program_id(2)
    rows = n0 + tl.arange(0, BN)
    each = tl.cdiv(blocks, SPLIT)
    first = part * each
    last = tl.minimum(first + each, blocks)
    acc = tl.zeros((BN, BM), tl.float32)
    eight = _integers(tl.full((BN, 1), 8, tl.uint8), X)
    STEP: tl.constexpr = 2 if GROUP == HALF else 1  # groups per tile of K
    g = first * 2 * HALF // GROUP
    # Scales and offsets of the next tile are requested before this tile is multiplied.
    s0 = _parameter(scales, g, rows, N, groups)
    s1 = _parameter(scales, g + STEP - 1, rows, N, groups)
    o0, o1 = s0, s1
    if OFFSET != "eight":
        o0 = _parameter(offsets, g, rows, N, groups)
        o1 = _parameter(offsets, g + STEP - 1, rows, N, groups)
    for b in range(first, last):
        packed = codes.load([n0, b * HALF])
        x0, x1 = x.load([m0, b * 2 * HALF]), x.load([m0, b * 2 * HALF + HALF])
        after = (b + 1) * 2 * HALF // GROUP
        next_s0, next_o0 = _parameter(scales, after, rows, N, groups), o0
        if OFFSET != "eight":
            next_o0 = _parameter(offsets, after, rows, N, groups)
        next_s1, next_o1 = next_s0, next_o0
        if STEP == 2:
            next_s1 = _parameter(scales, after + 1, rows, N, groups)
            if OFFSET != "eight":
                next_o1 = _parameter(offsets, after + 1, rows, N, groups)
        z0, z1 = eight, eight
        if OFFSET == "zeros":
            z0, z1 = _integers(o0, X)[:, None], _integers(o1, X)[:, None]
        w0, w1 = _integers(packed & 15, X) - z0, _integers(packed >> 4, X) - z1
        if STEP == 2:
            acc += tl.dot(w0, x0.T) * s0.to(tl.float32)[:, None]
            acc += tl.dot(w1, x1.T) * s1.to(tl.float32)[:, None]
        else:
            acc += tl.dot(w1, x1.T, tl.dot(w0, x0.T)) * s0.to(tl.float32)[:, None]
        if OFFSET == "centres":
            sum0, sum1 = tl.sum(x0.to(tl.float32), 1)[None, :], tl.sum(x1.to(tl.float32), 1)[None, :]
            acc += o0.to(tl.float32)[:, None] * sum0
            acc += o1.to(tl.float32)[:, None] * sum1
        s0, s1, o0, o1 = next_s0, next_s1, next_o0, next_o1
    if ATOMIC:
        ms = m0 + tl.arange(0, BM)
        where = y + ms[:, None].to(tl.int64) * N + rows[None, :]
        tl.atomic_add(where, acc.T, mask=(ms < m_rows)[:, None] & (rows < N)[None, :], sem="relaxed")
    else:
        y.store([part * m_rows + m0, n0], acc.T.to(y.dtype))


def _build(name: str, group: int, offset: str, split: int, bm: int, bn: int, *, kind: str = "bf16",
           warps: int = 4, atomic: bool = False, regs: int = 96, fails: bool = False) -> Build:  # fmt: skip
    half, out = min(group, 64), "fp32" if split > 1 else kind
    y = "*fp32" if atomic else f"tensordesc<{out}[{bm},{bn}]>"
    signature = {"x": f"tensordesc<{kind}[{bm},{half}]>", "codes": f"tensordesc<u8[{bn},{half}]>", "y": y}
    signature |= {"scales": f"*{kind}", "offsets": "*u8" if offset != "centres" else f"*{kind}"}
    signature |= dict.fromkeys(("m_rows", "N", "groups", "blocks"), "i32")
    constants = {"GROUP": group, "HALF": half, "OFFSET": offset, "SPLIT": split, "ATOMIC": atomic}
    # One HGMMA per 16 inputs and 64 rows, A from registers. No int-to-float conversions, no byte loads from
    # shared memory, and no serialised wgmma: at most one fence pair per dot.
    products = half // 8 * bn // (16 * warps)
    sass = {"HGMMA": Bound(products, products), "HMMA": Bound(0, 0), "I2F": Bound(0, 0)}
    sass |= {"LDS.U8": Bound(0, 0), "UTMALDG": Bound(3), "WARPGROUP": Bound(0, 6), "LDL": Bound(0, 0)}
    sass |= {"STL": Bound(0, 0), "stack": Bound(0, 0), "regs": Bound(0, regs), "warnings": Bound(0, 0)}
    sass["REDG" if atomic else "UTMASTG"] = Bound(1)
    return Build(name, signature, {**constants, "BM": bm, "BN": bn}, warps, 4 if bm == 16 else 3,
                 ("scales", "offsets", "N"), sass, fails)  # fmt: skip


BUILDS = (
    _build("decode, groups of 128, zeros, split 4", 128, "zeros", 4, 16, 64),
    _build("decode, groups of 128, symmetric", 128, "eight", 1, 16, 64),
    _build("decode, groups of 64, zeros", 64, "zeros", 1, 16, 64),
    _build("decode, groups of 32, float centres", 32, "centres", 1, 16, 64),
    _build("decode, groups of 128, zeros, fp16", 128, "zeros", 4, 16, 64, kind="fp16"),
    _build("decode, atomic split 4 (not deterministic)", 128, "zeros", 4, 16, 64, atomic=True),
    _build("prefill 64 x 128, groups of 128, zeros", 128, "zeros", 1, 64, 128, warps=8, regs=128),
    # Four times the accumulator for the same warps: spills, and ptxas says that it serialises wgmma (C7512).
    _build("control 64 x 256 at 4 warps", 128, "zeros", 1, 64, 256, regs=255, fails=True),
)


def cost(M: int, N: int, K: int, group: int = 128, zeros: bool = True, **_: object) -> Cost:
    """Work of one product: codes, bf16 scales and byte zeros once, activations in and out."""
    return Cost(2 * M * N * K, N * K // 2 + N * (K // group) * (3 if zeros else 2) + 2 * M * (K + N))


KERNEL = Kernel(
    "w4a16", "Four-bit weights, 16-bit activations", "triton", "Marlin (arXiv 2408.11743), AWQ, GPTQ",
    w4a16_kernel, BUILDS, cost,
)  # fmt: skip


def _tile(m: int) -> tuple[int, int, int]:
    """(BM, BN, warps) by token count; not tuned on a device yet."""
    if m <= 16:
        return 16, 64, 4
    return (32, 64, 4) if m <= 32 else (64, 128, 8)


def w4a16(x: Tensor, weight: W4, *, split: int = 0, atomic: bool = False) -> Tensor:
    """``x`` [M, K] (bf16 or fp16) times the stored weights, transposed: [M, N] in x's dtype.

    ``split`` cuts K into parts (0: by shape and device). ``atomic`` adds the parts in no fixed order. Runs
    on CUDA, or in the interpreter. Raises :class:`UnsupportedInput` for another dtype, strides TMA cannot
    read, N not a multiple of 8, or sizes that do not match.
    """
    m, n, k = x.shape[0], weight.n, weight.k
    parameters = weight.zeros if weight.zeros is not None else weight.centres
    check_device("w4a16", x, weight.codes, weight.scales, parameters)
    check_rows("w4a16", "x", x, FLOATS)
    check_rows("w4a16", "codes", weight.codes, (torch.uint8,))
    check_dense("w4a16", "scales", weight.scales, (*FLOATS, torch.float32))
    if x.shape[1] != k or n % 8 or split < 0:
        raise UnsupportedInput(
            f"w4a16: x {tuple(x.shape)} against weights {(n, k)}, split {split}.",
            hint="x must have as many columns as the weights inputs; N must be a multiple of 8.",
        )
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    bm, bn, warps = _tile(m)
    half, blocks = weight.half, weight.codes.shape[1] // weight.half
    grid_n, grid_m = triton.cdiv(n, bn), triton.cdiv(m, bm)
    split = min(split or choose_split(grid_n * grid_m, k, processors(x.device)), blocks)
    offset = "zeros" if weight.zeros is not None else "centres" if weight.centres is not None else "eight"
    rows = m if atomic else partial_rows(m, bm, split)
    out = torch.zeros_like(y, dtype=torch.float32) if atomic else workspace(y, rows, split)
    w4a16_kernel[(grid_n, grid_m, split)](
        TensorDescriptor.from_tensor(x, [bm, half]),
        TensorDescriptor.from_tensor(weight.codes, [bn, half]),
        out if atomic else TensorDescriptor.from_tensor(out, [bm, bn]),
        weight.scales, parameters if parameters is not None else weight.scales,
        rows, n, weight.scales.shape[0], blocks,
        GROUP=weight.group, HALF=half, OFFSET=offset, SPLIT=split, ATOMIC=atomic, BM=bm, BN=bn,
        num_warps=warps, num_stages=4 if bm == 16 else 3,
    )  # fmt: skip
    if atomic:
        return out.to(x.dtype)
    if split > 1:
        add_parts(out, y, rows, split)
    return y
