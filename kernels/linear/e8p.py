"""E8P weights at 2 bits: y = x W^T with 8 weights in 16 bits, decoded in registers.

    y[m, n] = row_scale[n] * sum_k  codeword[n, k] * x[m, k],   codeword = sign * pattern +- 1/4

QuIP#'s decode GEMM (arXiv 2402.04396, section 4.2); x is already in the rotated basis (``hadamard``). Four
times a codeword is a vector of odd integers in -11..11, so weights are exact in 16 bits. One table read gives
the magnitudes of 8 weights in 2 bits each (512 bytes, in the first-level cache; 16-bit entries on purpose:
wider gathers would be routed through shared memory by the pipeliner). Four weights at a time are then bytes
of one word: 12 + 4 * codeword, never negative, so signs and shift are applied without carries; a byte becomes
a float as in ``w4a16``. Weight rows ride in the M of wgmma. About 14 instructions a weight remain, most of
them integer: this kernel saves memory first, and time only where weights dominate.

Layout: ``workbench.kernels.layouts.e8p``. FLOPs 2 M N K. Bytes N K / 4 + 4 N + 2 M (K + N).
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from workbench.kernels.layouts.e8p import E8P, TILE, table
from workbench.kernels.linear.operands import FLOATS, check_dense, check_device, check_rows, processors
from workbench.kernels.linear.split import add_parts, choose_split, partial_rows, workspace
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.spec.errors import UnsupportedInput


def reference(x: Tensor, weight: E8P, dtype: torch.dtype = torch.float64) -> Tensor:
    """``x @ W^T`` [M, N] in ``dtype``, with the stored weights."""
    return x.to(dtype) @ weight.values(dtype).t()


@triton.jit
def _four(base, fields, signs):
    """Bytes 12 + 4 * codeword of four entries: 2-bit fields f mean magnitudes f + 1/2, signs are bits."""
    f = (fields | fields << 6 | fields << 12 | fields << 18) & 0x03030303  # one field per byte
    negative = ((signs * 0x00204081) & 0x01010101) * 255  # one sign per byte, spread over it
    return base + (f << 2) - ((0x04040404 + (f << 3)) & negative)


@triton.jit
def _weights(codes, patterns, X: tl.constexpr):
    """4 * codewords [BN, 8 * C] of codes [BN, C] as floats of type X, exactly."""
    BN: tl.constexpr = codes.shape[0]
    BK: tl.constexpr = codes.shape[1] * 8
    BITS: tl.constexpr = 0x4300 if X == tl.bfloat16 else 0x6400  # noqa: SIM300
    ZERO: tl.constexpr = 128 + 12 if X == tl.bfloat16 else 1024 + 12  # noqa: SIM300
    code = codes.to(tl.int32) & 0xFFFF
    fields = tl.load(patterns + (code >> 8)).to(tl.int32) & 0xFFFF
    # The eighth sign makes the sum even: the parity of the other signs and of the entries 3/2.
    signs = (code >> 1) & 127
    odd = (fields & 0x5555) ^ ((fields & 0x5555) >> 8) ^ signs
    odd ^= odd >> 4
    odd ^= odd >> 2
    signs |= ((odd ^ (odd >> 1)) & 1) << 7
    base = 0x0D0D0D0D + (code & 1) * 0x02020202  # 12 + 4 (1/2 - 1/4); a shift of +1/4 is 2 more
    low, high = _four(base, fields & 255, signs & 15), _four(base, fields >> 8, signs >> 4)
    eight = tl.join(low, high)[:, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, :]
    floats = ((eight & 255) | BITS).to(tl.uint16).to(X, bitcast=True)
    return (floats - tl.full((1, 1, 1, 1), ZERO, X)).reshape(BN, BK)


@triton.jit
def e8p_kernel(x, codes, y, patterns, row_scale, m_rows, N, blocks, SPLIT: tl.constexpr,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One [BN, BM] tile of y^T over one part of K."""
    n0, m0, part = tl.program_id(0) * BN, tl.program_id(1) * BM, tl.program_id(2)
    each = tl.cdiv(blocks, SPLIT)
    first = part * each
    last = tl.minimum(first + each, blocks)
    acc = tl.zeros((BN, BM), tl.float32)
    for b in range(first, last):
        w = _weights(codes.load([n0, b * (BK // 8)]), patterns, x.dtype)
        # The quarter also keeps the product out of a long accumulator in flight, which ptxas would serialise.
        acc += tl.dot(w, x.load([m0, b * BK]).T) * 0.25
    rows = n0 + tl.arange(0, BN)
    scale = tl.load(row_scale + rows, mask=rows < N, other=0.0)
    y.store([part * m_rows + m0, n0], (acc * scale[:, None]).T.to(y.dtype))


def _build(name: str, split: int, bm: int, *, kind: str = "bf16", regs: int = 100) -> Build:
    out, bn = "fp32" if split > 1 else kind, 64
    signature = {"x": f"tensordesc<{kind}[{bm},{TILE}]>", "codes": f"tensordesc<i16[{bn},{TILE // 8}]>"}
    signature |= {"y": f"tensordesc<{out}[{bm},{bn}]>", "patterns": "*i16", "row_scale": "*fp32"}
    signature |= dict.fromkeys(("m_rows", "N", "blocks"), "i32")
    # 8 HGMMA for 128 inputs. 64 weights a thread and tile: about 5 LOP3 each; a table gathered through shared
    # memory would show as LDGSTS, conversions as I2F, two floats not packed into one HADD2 as 64 of them.
    sass = {"HGMMA": Bound(8, 8), "HMMA": Bound(0, 0), "I2F": Bound(0, 0), "LDGSTS": Bound(0, 0)}
    sass |= {"LDS.U8": Bound(0, 0), "LOP3": Bound(0, 345), "HADD2": Bound(32, 40), "WARPGROUP": Bound(0, 4)}
    sass |= {"UTMALDG": Bound(2), "UTMASTG": Bound(1), "LDL": Bound(0, 0), "STL": Bound(0, 0)}
    sass |= {"stack": Bound(0, 0), "regs": Bound(0, regs), "warnings": Bound(0, 0)}
    constants = {"SPLIT": split, "BM": bm, "BN": bn, "BK": TILE}
    return Build(name, signature, constants, 4, 4, ("patterns", "row_scale", "N"), sass)


BUILDS = (
    _build("decode, split 4", 4, 16),
    _build("decode, fp16", 1, 16, kind="fp16"),
    _build("prefill 64 x 64", 1, 64, regs=136),
)


def cost(M: int, N: int, K: int, **_: object) -> Cost:
    """Work of one product: codes and row scales once, activations in and out."""
    return Cost(2 * M * N * K, N * K // 4 + 4 * N + 2 * M * (K + N))


KERNEL = Kernel(
    "e8p", "QuIP# lattice weights at 2 bits", "triton", "QuIP# (arXiv 2402.04396)", e8p_kernel, BUILDS, cost
)

_patterns = cache(table)


def e8p(x: Tensor, weight: E8P, *, split: int = 0) -> Tensor:
    """``x`` [M, K] (bf16 or fp16, rotated) times the stored weights, transposed: [M, N] in x's dtype.

    ``split`` cuts K into parts that are added in order (0: by shape and device). Runs on CUDA, or in the
    interpreter. Raises :class:`UnsupportedInput` for another dtype, strides TMA cannot read, N not a
    multiple of 8, or sizes that do not match.
    """
    m, n, k = x.shape[0], weight.n, weight.k
    check_device("e8p", x, weight.codes, weight.row_scale)
    check_rows("e8p", "x", x, FLOATS)
    check_rows("e8p", "codes", weight.codes, (torch.int16,))
    check_dense("e8p", "row_scale", weight.row_scale, (torch.float32,))
    if x.shape[1] != k or n % 8 or split < 0:
        raise UnsupportedInput(
            f"e8p: x {tuple(x.shape)} against weights {(n, k)}, split {split}.",
            hint="x must have as many columns as the weights inputs; N must be a multiple of 8.",
        )
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    bm, bn = 16 if m <= 16 else 32 if m <= 32 else 64, 64
    blocks = weight.codes.shape[1] * 8 // TILE
    grid_n, grid_m = triton.cdiv(n, bn), triton.cdiv(m, bm)
    split = min(split or choose_split(grid_n * grid_m, k, processors(x.device)), blocks)
    rows = partial_rows(m, bm, split)
    out = workspace(y, rows, split)
    e8p_kernel[(grid_n, grid_m, split)](
        TensorDescriptor.from_tensor(x, [bm, TILE]),
        TensorDescriptor.from_tensor(weight.codes, [bn, TILE // 8]),
        TensorDescriptor.from_tensor(out, [bm, bn]),
        _patterns(x.device), weight.row_scale, rows, n, blocks,
        SPLIT=split, BM=bm, BN=bn, BK=TILE, num_warps=4, num_stages=4,
    )  # fmt: skip
    if split > 1:
        add_parts(out, y, rows, split)
    return y
