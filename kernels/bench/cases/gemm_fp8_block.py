"""Block-scaled FP8 products: against float64 on the stored values; outliers; then squares of 8192."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench import products
from workbench.kernels.bench.baselines import cublas
from workbench.kernels.bench.case import Goal, Lab, Outputs, Trial
from workbench.kernels.bench.ceilings import scaled_mm
from workbench.kernels.layouts.w8 import FP8Blocks, quantize_fp8_blocks
from workbench.kernels.linear import quantize_rows
from workbench.kernels.linear.gemm_fp8_block import cost, gemm_fp8_block, reference


def _scaled(codes: Tensor, weight: FP8Blocks, **_: Any) -> Outputs:
    """cuBLAS's FP8 product with one scale per tensor: other numbers, the speed to be near."""
    scaled_mm(codes, weight.codes)
    return {}


def make(lab: Lab, *, M: int, N: int, K: int) -> Trial:
    """Normal numbers, a few a hundred times larger, quantized as the library does."""
    x, w = lab.normal(M, K, dtype=torch.float32), lab.normal(N, K, dtype=torch.float32)
    x *= torch.where(lab.integers(0, 1000, M, K) == 0, 100.0, 1.0)
    codes, scales = quantize_rows.reference(x, groups=True)
    scales, weight = scales.contiguous(), quantize_fp8_blocks(w)
    arguments: dict[str, Any] = {"codes": codes, "scales": scales, "weight": weight}
    arguments |= {"x": x.bfloat16(), "dense": w.bfloat16()}

    def call(codes: Tensor, scales: Tensor, weight: FP8Blocks, **_: Any) -> Outputs:
        return {"y": gemm_fp8_block(codes, scales, weight)}

    exact = functools.partial(reference, codes, scales, weight)
    baselines: dict[str, Any] = {
        "torch._scaled_mm": _scaled,
        "cuBLAS bf16": lambda **a: {"bf16": cublas(**a)["y"]},
    }
    return Trial(arguments, call, lambda: {"y": exact()}, products.rounded(exact, torch.bfloat16),
                 baselines=baselines)  # fmt: skip


_case: Any = functools.partial(products.case, "gemm_fp8_block", make, cost, unit="fp8")

CASES = (
    _case(1, 64, 128),
    _case(50, 200, 272, note="ragged"),
    _case(130, 264, 528, note="ragged"),
    _case(1000, 1024, 4096),
    _case(512, 512, 32768, note="long sums"),
    _case(16, 8192, 8192, timed=True),
    _case(8192, 8192, 8192, Goal(900, 1150, 1350), timed=True),
)
