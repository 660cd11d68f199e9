"""NVFP4 and MXFP4 weights: every code under every kind of scale, then a wide layer."""

from __future__ import annotations

import functools
from typing import Any

import torch

from workbench.kernels.bench import products
from workbench.kernels.bench.case import Lab, Trial
from workbench.kernels.layouts.fp4 import pack_fp4
from workbench.kernels.linear.fp4_gemm import cost, fp4_gemm


def make(lab: Lab, *, M: int, N: int, K: int, block: int = 16, half: str = "bfloat16") -> Trial:
    """Blocks of 16 with E4M3 scales (NVFP4), or of 32 with powers of two (MXFP4)."""
    codes, count = lab.integers(0, 16, N, K, dtype=torch.uint8), -(-K // block)
    if block == 16:
        scales = lab.normal(N, count, dtype=torch.float32).abs().to(torch.float8_e4m3fn)
        weight = pack_fp4(codes, scales, lab.normal(N, dtype=torch.float32).abs() / 100)
    else:
        weight = pack_fp4(codes, lab.integers(110, 124, N, count, dtype=torch.uint8))
    return products.trial(lab, fp4_gemm, weight, lab.normal(M, K, dtype=getattr(torch, half)))


_case: Any = functools.partial(products.case, "fp4_gemm", make, cost)

CASES = (
    _case(1, 64, 128, note="NVFP4"),
    _case(5, 72, 272, block=32, note="MXFP4"),
    _case(50, 104, 1152, half="float16", note="NVFP4 fp16"),
    _case(130, 512, 1024, block=32, note="MXFP4"),
    _case(16, 4096, 4096, note="NVFP4 split-K"),
    _case(16, 8192, 8192, note="NVFP4", timed=True, variants={"no split-K": {"split": 1}}),
    _case(16, 8192, 8192, note="MXFP4", timed=True, block=32),
    _case(512, 8192, 8192, note="NVFP4", timed=True),
)
