"""Merging attention over disjoint sets of keys: splits of one sequence, or a shared prefix and a suffix.

Attention over a union of key sets follows from each set's output and log-sum-exp (Milakov & Gimelshein, arXiv
1805.02867; Flash-Decoding; Hydragen, arXiv 2402.05099, section 3.1):
``lse = log sum_i exp(lse_i)``, ``out = sum_i exp(lse_i - lse) out_i``. A set that no row sees has lse = -inf
and weighs 0 whatever its output slot holds; rows that see nothing at all give 0 and -inf. The order of the
sum is the order of the parts, so results are the same from run to run.

FLOPs 2 R N D; bytes R N (4 D + 4) read and R (D * itemsize + 4) written, for R rows and N parts.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from workbench.kernels.attention.softmax import LN2, LOG2E
from workbench.kernels.checks import (
    require,
    require_contiguous,
    require_device,
    require_dtype,
    require_runnable,
    require_shape,
)
from workbench.kernels.spec import Bound, Build, Cost, Kernel

_AT_ONCE = 8


def reference(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [..., N, D] and log-sum-exps [..., N] (natural) merged: float64 [..., D] and [...]."""
    lses = lses.double()
    peak = lses.amax(-1, keepdim=True)
    weight = (lses - peak.masked_fill(peak == -math.inf, 0.0)).exp()  # one that is NaN makes its row NaN
    total = weight.sum(-1, keepdim=True)
    weight = (weight / total.masked_fill(total == 0, 1.0))[..., None]
    parts = outs.double().masked_fill(weight == 0, 0.0)
    return (weight * parts).sum(-2), lses.logsumexp(-1)


@triton.jit
def decode_combine_kernel(
    out, lse, outs, lses, N, D: tl.constexpr, HD: tl.constexpr, NP: tl.constexpr, AT_ONCE: tl.constexpr
):
    """Program (row): ``outs`` [R, N, D], ``lses`` fp32 [R, N] to ``out`` [R, D], ``lse`` fp32 [R]."""
    row = tl.program_id(0).to(tl.int64)
    part, column = tl.arange(0, NP), tl.arange(0, HD)
    each = tl.load(lses + row * N + part, mask=part < N, other=-float("inf"))
    peak = tl.max(each, 0)
    blank = tl.min((each == -float("inf")).to(tl.int32), 0) == 1  # not the peak: a NaN is to be passed on
    base = tl.where(blank, 0.0, peak)
    total = tl.sum(tl.exp2((each - base) * LOG2E), 0)
    acc = tl.zeros([HD], tl.float32)
    for first in tl.range(0, N, AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)
        one = tl.load(lses + row * N + i, mask=i < N, other=-float("inf"))
        weight = tl.exp2((one - base) * LOG2E)
        at = outs + (row * N + i)[:, None] * D + column[None, :]
        o = tl.load(at, mask=(weight > 0.0)[:, None] & (column < D)[None, :], other=0.0)
        acc += tl.sum(o.to(tl.float32) * weight[:, None], 0)
    total = tl.where(blank, 1.0, total)
    acc = acc / total
    tl.store(out + row * D + column, acc.to(out.dtype.element_ty), mask=column < D)
    tl.store(lse + row, tl.where(blank, -float("inf"), base + tl.log2(total) * LN2))


def decode_combine(outs: Tensor, lses: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Merge N partial results: ``outs`` [..., N, D], ``lses`` float32 [..., N], natural log.

    Returns ``out`` [..., D] in ``dtype`` (that of ``outs`` when None) and ``lse`` float32 [...].
    Raises ``UnsupportedInput`` for more than 1,024 parts, head sizes above 512, views, or the wrong device.
    """
    require_runnable("decode_combine", outs)
    require_dtype("outs", outs, (torch.float32, torch.bfloat16, torch.float16))
    require_dtype("lses", lses, (torch.float32,))
    require(outs.dim() >= 2, f"outs is {tuple(outs.shape)}.", "It takes [..., parts, D].")
    require_shape("lses", lses, tuple(outs.shape[:-1]))
    require_contiguous("outs", outs)
    require_contiguous("lses", lses)
    require_device(outs, lses=lses)
    *rows, parts, dim = outs.shape
    require(1 <= parts <= 1024, f"{parts} parts cannot be merged at once.", "Merge 1 to 1024 parts.")
    require(1 <= dim <= 512, f"Head size {dim} is not supported.", "It takes up to 512.")
    out = torch.empty((*rows, dim), dtype=dtype or outs.dtype, device=outs.device)
    lse = torch.empty(rows, dtype=torch.float32, device=outs.device)
    if lse.numel():
        decode_combine_kernel[(lse.numel(),)](
            out,
            lse,
            outs,
            lses,
            parts,
            D=dim,
            HD=triton.next_power_of_2(dim),
            NP=triton.next_power_of_2(parts),
            AT_ONCE=_AT_ONCE,
            num_warps=2,
        )
    return out, lse


def cascade(
    prefix: tuple[Tensor, Tensor], suffix: tuple[Tensor, Tensor], dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention over a shared prefix with attention over each sequence's own suffix.

    Each argument is ``(out [..., D], lse [...])``; the prefix was read once for all rows that share it.
    Returns what :func:`decode_combine` does.
    """
    outs = torch.stack([prefix[0], suffix[0].to(prefix[0].dtype)], -2)
    return decode_combine(outs, torch.stack([prefix[1], suffix[1]], -1), dtype)


def _cost(rows: int, parts: int, dim: int, itemsize: int = 2) -> Cost:
    return Cost(2 * rows * parts * dim, rows * (parts * (4 * dim + 4) + dim * itemsize + 4))


def _build(name: str, dim: int, parts: int) -> Build:
    return Build(
        name,
        {"out": "*bf16", "lse": "*fp32", "outs": "*fp32", "lses": "*fp32", "N": "i32"},
        {"D": dim, "HD": dim, "NP": parts, "AT_ONCE": _AT_ONCE},
        num_warps=2,
        aligned=("out", "lse", "outs", "lses"),
        # Bandwidth only: no matrix units, wide loads, few registers so that many rows are in flight.
        sass={"HMMA": Bound(0, 0), "LDL": Bound(0, 0), "STL": Bound(0, 0), "regs": Bound(0, 64)},
    )


BUILDS = (_build("hd128, 16 parts", 128, 16), _build("hd64, 128 parts", 64, 128))

KERNEL = Kernel(
    name="decode_combine",
    title="Merge of partial attention by log-sum-exp: splits, shared prefixes",
    language="triton",
    source="Flash-Decoding; Hydragen, arXiv 2402.05099, section 3.1",
    function=decode_combine_kernel,
    builds=BUILDS,
    cost=_cost,
)
