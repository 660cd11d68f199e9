"""INT8 products, whose sums are exact: against float64, rounded once; then a wide layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench import products
from workbench.kernels.bench.baselines import cublas
from workbench.kernels.bench.case import Lab, Outputs, Trial
from workbench.kernels.layouts.w8 import W8
from workbench.kernels.linear.w8a8 import cost, reference, w8a8


def _int_mm(codes: Tensor, scales: Tensor, weight: W8, **_: Any) -> Outputs:
    """cuBLAS's INT8 product (more than 16 rows), scaled by torch."""
    sums = torch._int_mm(codes, weight.codes.t())
    return {"y": (sums.float() * scales[:, None] * weight.scales).bfloat16()}


def make(lab: Lab, *, M: int, N: int, K: int) -> Trial:
    """Codes of all values, scales of about 0.01."""
    codes, rows = (lab.integers(-127, 128, size, K, dtype=torch.int8) for size in (M, N))
    scales, row_scales = (lab.normal(size, dtype=torch.float32).abs() * 0.01 for size in (M, N))
    weight = W8(rows, row_scales)
    arguments: dict[str, Any] = {"codes": codes, "scales": scales, "weight": weight}
    arguments |= {"x": (codes * scales[:, None]).bfloat16(), "dense": weight.values().bfloat16()}

    def call(codes: Tensor, scales: Tensor, weight: W8, x: Any, dense: Any, **options: Any) -> Outputs:
        return {"y": w8a8(codes, scales, weight, **options)}

    exact = functools.partial(reference, codes, scales, weight)
    baselines: dict[str, Any] = {"cuBLAS bf16": lambda **a: cublas(**a)}
    if M > 16:
        baselines["torch._int_mm, scaled"] = _int_mm
    return Trial(arguments, call, lambda: {"y": exact()}, products.rounded(exact, torch.bfloat16),
                 baselines=baselines)  # fmt: skip


_case: Any = functools.partial(products.case, "w8a8", make, cost, unit="int8")
_SPLITS = {"no split-K": {"split": 1}}

CASES = (
    _case(1, 64, 128),
    _case(17, 72, 272, note="ragged"),
    _case(130, 264, 528, note="ragged"),
    _case(16, 4096, 4096, note="split-K"),
    _case(1000, 1024, 4096, note="prefill"),
    _case(16, 8192, 8192, timed=True, variants=_SPLITS),
    _case(8192, 8192, 8192, timed=True),
)
