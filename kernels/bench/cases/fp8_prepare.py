"""Rotation and block quantization: as near the rotated values as torch's own, then a long prompt."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.attention.fp8_blocks import Fp8Blocks, restored
from workbench.kernels.attention.fp8_prepare import KERNELS, fp8_prepare, random_signs, reference, rotated
from workbench.kernels.bench.case import Case, Lab, Outputs, Trial
from workbench.kernels.spec import Cost


def on(x: Fp8Blocks, device: torch.device | str) -> Fp8Blocks:
    """The same blocks on another device."""
    moved = {f.name: getattr(x, f.name).to(device) for f in fields(x) if f.name not in ("q_lens", "kv_lens")}
    return replace(x, **moved)


def make(lab: Lab, *, q_lens: Any, kv_lens: Any, heads: int, kv_heads: int, dim: int, rotate: bool) -> Trial:
    """Rows with outliers; each of Q, K and V is judged by the values that its codes stand for."""
    q = lab.normal(sum(q_lens), heads, dim)
    k, v = (lab.normal(sum(kv_lens), kv_heads, dim) for _ in range(2))
    for x in (q, k):
        x[..., 5] *= 20
    signs = random_signs(dim, lab.seed % 1000) if rotate else None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Fp8Blocks:
        return fp8_prepare(q, k, v, q_lens, kv_lens, signs)

    def outputs(found: Fp8Blocks) -> Outputs:
        return _values(found, lab) if sum(kv_lens) < 4096 else {}

    def exact() -> Outputs:
        turned = (rotated(q.cpu().double(), signs), rotated(k.cpu().double(), signs), v.cpu().double())
        return {n: x.to(lab.device) for n, x in zip("qkv", turned, strict=True)}

    def plain() -> Outputs:
        return _values(reference(q.cpu(), k.cpu(), v.cpu(), q_lens, kv_lens, signs), lab)

    return Trial({"q": q, "k": k, "v": v}, call, exact, plain, outputs, launches=True)


def _values(x: Fp8Blocks, lab: Lab) -> Outputs:
    return {n: y.to(lab.device) for n, y in zip("qkv", restored(on(x, "cpu")), strict=True)}


def _case(name: str, q_lens: Any, kv_lens: Any, heads: int, kv_heads: int, dim: int, rotate: bool = True,
          timed: bool = False) -> Case:  # fmt: skip
    sizes = {"q_lens": q_lens, "kv_lens": kv_lens, "heads": heads, "kv_heads": kv_heads, "dim": dim}
    rows, keys = sum(q_lens) * heads, sum(kv_lens) * kv_heads
    each = ((rows, rotate), (keys, rotate), (keys, False))
    parts = [KERNELS[0].cost(n, 1, dim, turned) for n, turned in each]
    work = Cost(sum(c.flops for c in parts), sum(c.bytes for c in parts))
    return Case("fp8_prepare", name, make, {**sizes, "rotate": rotate}, work, timed=timed)


LONG = [16384]
CASES = (
    _case("one token", [1], [1], 2, 1, 64),
    _case("ragged", [130, 5], [130, 300], 4, 2, 128),
    _case("not rotated", [200], [200], 2, 2, 128, False),
    _case("2000 tokens", [2000], [2000], 8, 2, 128),
    _case("hd128 16k", LONG, LONG, 16, 16, 128, timed=True),
    _case("hd64 16k", LONG, LONG, 32, 32, 64, timed=True),
)
