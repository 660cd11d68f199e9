"""Lattice weights at two bits: all codewords, then a wide layer."""

from __future__ import annotations

import functools
from typing import Any

import torch

from workbench.kernels.bench import products
from workbench.kernels.bench.case import Lab, Trial
from workbench.kernels.layouts.e8p import pack_e8p
from workbench.kernels.linear.e8p import cost, e8p


def make(lab: Lab, *, M: int, N: int, K: int, half: str = "bfloat16") -> Trial:
    """Random codes and row scales."""
    scales = lab.normal(N, dtype=torch.float32).abs() / 50 + 0.01
    weight = pack_e8p(lab.integers(0, 65536, N, K // 8), scales)
    return products.trial(lab, e8p, weight, lab.normal(M, K, dtype=getattr(torch, half)))


_case: Any = functools.partial(products.case, "e8p", make, cost)

CASES = (
    _case(1, 64, 128),
    _case(5, 72, 264, note="ragged"),
    _case(50, 104, 1152, half="float16", note="fp16"),
    _case(16, 4096, 4096, note="split-K"),
    _case(1, 8192, 8192, timed=True, variants={"no split-K": {"split": 1}}),
    _case(16, 8192, 8192, timed=True),
)
