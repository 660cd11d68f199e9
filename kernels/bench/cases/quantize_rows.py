"""Activations to eight bits: the very codes and scales of the reference, then a long prompt's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench.case import Case, Lab, Outputs, Trial
from workbench.kernels.linear.quantize_rows import cost, quantize_groups, quantize_rows, reference


def make(lab: Lab, *, M: int, K: int, groups: bool = False, smooth: bool = False) -> Trial:
    """Rows of mixed size, a row of zeros among them when there are several."""
    x = lab.normal(M, K) * lab.normal(M, 1).exp()
    x[M // 2 :][:1] *= 0 if M > 1 else 1
    factors = lab.normal(K, dtype=torch.float32).exp() if smooth else None

    def call(x: Tensor, factors: Tensor | None) -> Outputs:
        codes, scales = quantize_groups(x) if groups else quantize_rows(x, factors)
        return {"codes": codes, "scales": scales}

    def exact() -> Outputs:
        codes, scales = reference(x, factors, groups=groups)
        return {"codes": codes, "scales": scales}

    return Trial({"x": x, "factors": factors}, call, exact, within={"codes": 0.0, "scales": 0.0})


def _case(name: str, m: int, k: int, timed: bool = False, **options: Any) -> Case:
    return Case("quantize_rows", name, make, {"M": m, "K": k, **options}, cost(M=m, K=k), timed=timed)


CASES = (
    _case("one row", 1, 64),
    _case("INT8, ragged", 7, 200),
    _case("INT8, smoothed", 65, 4096, smooth=True),
    _case("E4M3 per 128", 65, 4096, groups=True),
    _case("E4M3 per 128, ragged", 9, 1000, groups=True),
    _case("INT8, 8k x 4k", 8192, 4096, timed=True),
    _case("E4M3, 8k x 4k", 8192, 4096, timed=True, groups=True),
)
