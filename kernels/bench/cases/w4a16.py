"""Four-bit weights: every kind of offset and group, ragged sizes, then decode and prefill of a wide layer."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench import products
from workbench.kernels.bench.case import Goal, Lab, Trial
from workbench.kernels.layouts.w4 import pack_w4
from workbench.kernels.linear.w4a16 import cost, w4a16


def make(
    lab: Lab, *, M: int, N: int, K: int, group: int = 128, offset: str = "zeros", half: str = "bfloat16"
) -> Trial:
    """Random codes under scales of about 0.02; ``offset`` is eight, zeros or centres."""
    kind, groups = getattr(torch, half), -(-K // group)
    scales = (lab.normal(N, groups, dtype=torch.float32).abs() * 0.01 + 0.01).to(kind)
    more: dict[str, Tensor] = {}
    if offset == "zeros":
        more["zeros"] = lab.integers(0, 17, N, groups)
    elif offset == "centres":
        more["centres"] = lab.normal(N, groups, dtype=kind) / 50
    weight = pack_w4(lab.integers(0, 16, N, K, dtype=torch.uint8), scales, group=group, **more)
    return products.trial(lab, w4a16, weight, lab.normal(M, K, dtype=kind))


_case: Any = functools.partial(products.case, "w4a16", make, cost)
_decode: Any = functools.partial(_case, timed=True)
_SPLITS = {"no split-K": {"split": 1}, "split-K 8": {"split": 8}, "atomic split-K": {"atomic": True}}
_DECODE_GOALS = (Goal(2.2, 2.9, 3.4), Goal(2.5, 3.3, 3.7, of="cuBLAS bf16"))

CASES = (
    _case(1, 64, 128),
    _case(5, 72, 256, group=32, offset="centres", note="centres per 32"),
    _case(16, 192, 576, group=64, note="groups of 64"),
    _case(50, 104, 1152, half="float16", note="fp16"),
    _case(130, 512, 1024, offset="eight", note="symmetric"),
    _case(16, 4096, 4096, note="split-K"),
    _case(512, 1024, 4096, note="prefill"),
    _decode(1, 8192, 8192, *_DECODE_GOALS, variants=_SPLITS),
    _decode(16, 8192, 8192, *_DECODE_GOALS, variants=_SPLITS),
    _decode(64, 8192, 8192),
    _decode(512, 8192, 8192, Goal(0.6, 0.75, 0.9, of="cuBLAS bf16")),
)
