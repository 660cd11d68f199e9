"""Random-sign Hadamard transform of rows, on tensor cores: y = signs_out * (H (signs_in * x)) / sqrt(n).

H is a Kronecker product (``workbench.numerics.hadamard``), so for a block of n = A B inputs seen as a matrix
X [A, B] it is H_A X H_B^T: two small products with matrices of +1 and -1, which bfloat16 holds exactly. An
operand of more than 8 significant bits is cut into bfloat16 parts, whose products add up in float32: one part
for bf16 inputs, two for fp16, three for float32 and for what lies between the two products. So results are as
good as a float32 matrix product, at a few percent of its operations. Blocks up to 128 are one product, over
64 blocks at a time. The transform is orthonormal, and block-diagonal when rows are longer than a block.

Used by QuIP# (arXiv 2402.04396), QuaRot (2404.00456) and MR-GPTQ; the butterfly form is in Dao's
fast-hadamard-transform. Operations 2 M K (A + B) per part. Bytes 2 M K elements and the signs.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.kernels.linear.operands import FLOATS, check_dense, check_device, check_shape, processors
from workbench.kernels.spec import Bound, Build, Cost, Kernel
from workbench.numerics import hadamard as numbers
from workbench.spec.errors import UnsupportedInput

PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
LARGEST = 128


def reference(
    x: Tensor, block: int = 0, signs_in: Tensor | None = None, signs_out: Tensor | None = None,
    *, transposed: bool = False, dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """The transform [M, K] by the dense matrix, in ``dtype``."""
    n = block or x.shape[1]
    h = numbers.hadamard(n).to(x.device, dtype) / n**0.5
    v = x.to(dtype) if signs_in is None else x.to(dtype) * signs_in.to(dtype)
    v = (v.unflatten(1, (-1, n)) @ (h if transposed else h.t())).flatten(1)
    return v if signs_out is None else v * signs_out.to(dtype)


@triton.jit
def _left(signs, v, PARTS: tl.constexpr):
    """``signs`` @ ``v`` for bfloat16 signs and float32 values cut into PARTS bfloat16 parts."""
    high = v.to(tl.bfloat16)
    out = tl.dot(signs, high)
    for _ in tl.static_range(PARTS - 1):
        v = v - high.to(tl.float32)
        high = v.to(tl.bfloat16)
        out = tl.dot(signs, high, out)
    return out


@triton.jit
def _right(v, signs, PARTS: tl.constexpr):
    """``v`` @ ``signs``, as above."""
    high = v.to(tl.bfloat16)
    out = tl.dot(high, signs)
    for _ in tl.static_range(PARTS - 1):
        v = v - high.to(tl.float32)
        high = v.to(tl.bfloat16)
        out = tl.dot(high, signs, out)
    return out


@triton.jit
def _matrix(pointer, rows, columns, SIZE: tl.constexpr):
    inside = (rows < SIZE)[:, None] & (columns < SIZE)[None, :]
    return tl.load(pointer + rows[:, None] * SIZE + columns[None, :], mask=inside, other=0.0)


@triton.jit
def hadamard_kernel(x, y, left, right, signs_in, signs_out, blocks, per_row, x_stride, y_stride, scale,
                    IN: tl.constexpr, OUT: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
                    A: tl.constexpr, B: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Blocks of A x B inputs, one at a time; with A = 1, BM blocks at a time. BM and BN pad A and B."""
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    h_right = _matrix(right, columns, columns, B)  # transposed by the host
    if A > 1:
        h_left = _matrix(left, rows, rows, A)
    EACH: tl.constexpr = BM if A == 1 else 1
    for at in range(tl.program_id(0) * EACH, blocks, PROGRAMS * EACH):
        block = at + rows if A == 1 else at + rows * 0
        inside = (block < blocks if A == 1 else rows < A)[:, None] & (columns < B)[None, :]
        within = 0 if A == 1 else rows * B
        here = (block % per_row * (A * B) + within)[:, None] + columns[None, :]
        row = (block // per_row).to(tl.int64)[:, None]
        v = tl.load(x + row * x_stride + here, mask=inside, other=0.0).to(tl.float32)
        if IN:
            v *= tl.load(signs_in + here, mask=inside, other=0.0)
        v = _right(v, h_right, PARTS)
        if A > 1:
            v = _left(h_left, v, 3)
        v *= scale
        if OUT:
            v *= tl.load(signs_out + here, mask=inside, other=0.0)
        tl.store(y + row * y_stride + here, v.to(y.dtype.element_ty), mask=inside)


def shape(n: int) -> tuple[int, int]:
    """``(A, B)`` of a block: the cheapest product of an order and a power of two that the kernel holds.

    Raises :class:`UnsupportedInput` for blocks with no such pair, :class:`OptionError` where there is no
    Hadamard matrix.
    """
    _, power = numbers.factors(n)
    if n <= LARGEST:
        return 1, n
    pairs = [(n // b, b) for b in (2**i for i in range(1, 8)) if power % b == 0 and n // b <= LARGEST]
    if not pairs:
        raise UnsupportedInput(
            f"hadamard: a block of {n} is beyond {LARGEST} x {LARGEST}.",
            hint="Transform smaller blocks: any order that divides the row.",
        )
    return min(pairs, key=lambda p: (bm := _pad(p[0], 64)) * (bn := _pad(p[1], 16)) * (3 * bm + bn))


def _pad(size: int, least: int) -> int:
    return max(least, triton.next_power_of_2(size))


def _tile(a: int, b: int) -> tuple[int, int, int]:
    """(BM, BN, warps): at least 64 rows, so that the products are wgmma."""
    bm, bn = 64 if a == 1 else _pad(a, 64), _pad(b, 16)
    return bm, bn, 4 if bm * bn <= 4096 else 8


def _build(name: str, n: int, kind: str, regs: int, spills: int = 0) -> Build:
    a, b = shape(n)
    bm, bn, warps = _tile(a, b)
    signature = {"x": f"*{kind}", "y": f"*{kind}", "left": "*bf16", "right": "*bf16"}
    signature |= {"signs_in": "*fp32", "signs_out": "*fp32", "scale": "fp32"}
    signature |= dict.fromkeys(("blocks", "per_row", "x_stride", "y_stride"), "i32")
    constants = {"IN": True, "OUT": False, "PARTS": 1 if kind == "bf16" else 3, "PROGRAMS": 264}
    constants |= {"A": a, "B": b, "BM": bm, "BN": bn}
    # The work is on tensor cores: no butterflies through shuffles (SHFL).
    sass = {"HGMMA": Bound(4), "HMMA": Bound(0, 0), "SHFL": Bound(0, 4), "LDL": Bound(0, spills)}
    sass |= {
        "STL": Bound(0, spills),
        "stack": Bound(0, 4 * spills),
        "regs": Bound(0, regs),
        "smem": Bound(0, 232_448),
    }
    return Build(name, signature, constants, warps, 1,
                 ("x", "y", "left", "right", "signs_in", "x_stride", "y_stride"), sass)  # fmt: skip


BUILDS = (
    _build("4096 = 64 x 64, bf16", 4096, "bf16", 128),
    _build("4096 = 64 x 64, fp32", 4096, "fp32", 168),
    _build("14336 = 112 x 128, bf16", 14336, "bf16", 224),
    _build("16384 = 128 x 128, fp32", 16384, "fp32", 255, spills=16),  # 9 seen: the one tile that is tight
    _build("blocks of 128, bf16", 128, "bf16", 136),
    _build("576 = 36 x 16, bf16", 576, "bf16", 64),
)


def cost(M: int, K: int, block: int = 0, parts: int = 1, size: int = 2, **_: object) -> Cost:
    """Work of one call; ``parts`` bfloat16 parts of an input, ``size`` bytes an element."""
    a, b = shape(block or K)
    return Cost(2 * M * K * (parts * b + (3 * a if a > 1 else 0)), 2 * size * M * K)


KERNEL = Kernel(
    "hadamard", "Random-sign Hadamard transform", "triton", "QuIP# (arXiv 2402.04396), QuaRot (2404.00456)",
    hadamard_kernel, BUILDS, cost,
)  # fmt: skip


@cache
def _factors(n: int, transposed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """H_A, and H_B transposed, bfloat16; the other way round for the transposed transform."""
    a, b = shape(n)
    left, right = numbers.hadamard(a), numbers.hadamard(b).t()
    if transposed:
        left, right = left.t(), right.t()
    return tuple(m.to(device, torch.bfloat16).contiguous() for m in (left, right))  # type: ignore[return-value]


def hadamard(
    x: Tensor, block: int = 0, signs_in: Tensor | None = None, signs_out: Tensor | None = None,
    *, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """The transform of the rows of ``x`` [M, K] (bf16, fp16 or fp32), in x's dtype.

    ``block`` divides K (0: the whole row). ``signs_in`` and ``signs_out``: float32 [K], usually +1 and -1;
    other factors are applied alike. With ``transposed`` H^T is applied: exchange the sign vectors too and
    it is the inverse. Runs on CUDA, or in the interpreter. Raises :class:`UnsupportedInput` for another
    dtype or layout or a block beyond 128 x 128, :class:`OptionError` for an order without a matrix.
    """
    check_device("hadamard", x, signs_in, signs_out)
    if x.ndim != 2 or x.dtype not in (*FLOATS, torch.float32) or (x.shape[1] > 1 and x.stride(1) != 1):
        raise UnsupportedInput(
            f"hadamard: x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}.",
            hint="It takes a matrix of bf16, fp16 or fp32 with dense rows.",
        )
    (m, k), n = x.shape, block or x.shape[1]
    if n < 1 or k % n:
        raise UnsupportedInput(f"hadamard: blocks of {n} do not divide rows of {k}.")
    for name, signs in (("signs_in", signs_in), ("signs_out", signs_out)):
        if signs is not None:
            check_dense("hadamard", name, signs, (torch.float32,))
            check_shape("hadamard", name, signs, (k,))
    y = torch.empty(m, k, dtype=x.dtype, device=x.device)
    if m == 0:
        return y
    a, b = shape(n)
    (bm, bn, warps), blocks = _tile(a, b), m * (k // n)
    programs = min(2 * processors(x.device), triton.cdiv(blocks, bm if a == 1 else 1))
    left, right = _factors(n, transposed, x.device)
    hadamard_kernel[(programs,)](
        x, y, left, right, x if signs_in is None else signs_in, x if signs_out is None else signs_out,
        blocks, k // n, x.stride(0), k, n**-0.5,
        IN=signs_in is not None, OUT=signs_out is not None, PARTS=PARTS[x.dtype], PROGRAMS=programs,
        A=a, B=b, BM=bm, BN=bn, num_warps=warps, num_stages=1,
    )  # fmt: skip
    return y
