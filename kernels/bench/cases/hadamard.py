"""Hadamard transforms: against the dense matrix in float64, rounded once; then a long prompt's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench.case import Case, Lab, Outputs, Trial
from workbench.kernels.linear.hadamard import cost, hadamard, reference
from workbench.numerics import hadamard as numbers


def make(lab: Lab, *, M: int, K: int, block: int = 0, kind: str = "bfloat16") -> Trial:
    """Random signs on the way in."""
    x = lab.normal(M, K, dtype=getattr(torch, kind))
    signs = torch.where(lab.integers(0, 2, K) == 0, -1.0, 1.0)

    def call(x: Tensor, signs: Tensor, **_: Any) -> Outputs:
        return {"y": hadamard(x, block, signs)}

    def dense(x: Tensor, signs: Tensor, matrix: Tensor) -> Outputs:
        rows = (x * signs.to(x.dtype)).unflatten(1, (-1, matrix.shape[0]))
        return {"y": (rows @ matrix.t()).flatten(1)}

    matrix = numbers.hadamard(block or K).to(lab.device).to(x.dtype) / (block or K) ** 0.5
    return Trial(
        {"x": x, "signs": signs, "matrix": matrix},
        call,
        exact=lambda: {"y": reference(x, block, signs)},
        plain=lambda: {"y": reference(x, block, signs, dtype=torch.float32).to(x.dtype)},
        baselines={"dense product": dense},
    )


def _case(name: str, m: int, k: int, timed: bool = False, **options: Any) -> Case:
    sizes = {"M": m, "K": k, **options}
    return Case("hadamard", name, make, sizes, cost(M=m, K=k, block=options.get("block", 0)), timed=timed)


CASES = (
    _case("one row of 64", 1, 64),
    _case("blocks of 128", 9, 640, block=128),
    _case("4096", 65, 4096),
    _case("12 x 2^k", 17, 1536),
    _case("float32", 17, 2048, kind="float32"),
    _case("8k x 4k", 8192, 4096, timed=True),
    _case("8k x 4k, blocks of 128", 8192, 4096, timed=True, block=128),
)
