"""Merging partial attention: empty parts hold NaN, then the splits of one decode step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.kernels.attention.decode_combine import KERNEL, decode_combine, reference
from workbench.kernels.bench.case import Case, Lab, Outputs, Trial


def make(lab: Lab, *, rows: int, parts: int, dim: int) -> Trial:
    """Some parts that saw nothing, whose outputs nobody wrote; and a row of such parts only."""
    outs, lses = lab.normal(rows, parts, dim, dtype=torch.float32), lab.normal(rows, parts).float() * 5
    lses[lab.integers(0, 4, rows, parts) == 0] = -torch.inf
    lses[rows // 2 :][: rows > 1] = -torch.inf
    outs[lses == -torch.inf] = torch.nan

    def call(outs: Tensor, lses: Tensor) -> Outputs:
        out, lse = decode_combine(outs, lses, torch.bfloat16)
        return {"out": out, "lse": lse}

    def exact() -> Outputs:
        return dict(zip(("out", "lse"), reference(outs, lses), strict=True))

    def plain() -> Outputs:
        return {"out": exact()["out"].bfloat16()}

    return Trial({"outs": outs, "lses": lses}, call, exact, plain, within={"lse": 1e-6})


def _case(name: str, timed: bool = False, **sizes: Any) -> Case:
    return Case("decode_combine", name, make, sizes, KERNEL.cost(**sizes), timed=timed)


CASES = (
    _case("one part", rows=3, parts=1, dim=64),
    _case("16 parts", rows=70, parts=16, dim=128),
    _case("300 parts, head size 80", rows=5, parts=300, dim=80),
    _case("512 rows, 8 parts", rows=512, parts=8, dim=128, timed=True),
    _case("64k rows, 16 parts", rows=65536, parts=16, dim=128, timed=True),
)
