"""Appending to the cache: the very bytes of the torch codecs, in every format, then a prompt's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.attention.kv_append import KERNELS, kivi_encode, kv_append, reference
from workbench.kernels.bench import pages
from workbench.kernels.bench.case import Case, Lab, Outputs, Trial
from workbench.kernels.layouts import kv_kivi


def make(lab: Lab, *, format: str, page: int, tokens: int, kv_heads: int, dim: int, rope: bool) -> Trial:
    """New rows for scattered slots of a poisoned pool; KIVI: full pages out of an open pool."""
    layout = pages.layout_of(format, page, kv_heads, dim)
    pool = -(-tokens // page) + 3
    planes = layout.allocate(pool, lab.device)
    pages.poison(planes)
    if format.startswith("kivi"):
        return _kivi(lab, layout, planes, pool, tokens // page)
    k, v = (lab.normal(tokens, kv_heads, dim) for _ in range(2))
    k[..., 3] *= 30
    slots = lab.order(pool * page)[:tokens].contiguous()
    if tokens > 4:
        slots[tokens // 2] = -1  # skipped
        v[1] = 0
    turn = lab.normal(tokens, dim, dtype=torch.float32) * 3
    cos, sin = (turn.cos(), turn.sin()) if rope else (None, None)
    scales = pages.TENSOR_SCALES if format == "nvfp4" else (1.0, 1.0)

    def call(k: Tensor, v: Tensor, planes: dict[str, Tensor], slots: Tensor, **turns: Any) -> Outputs:
        kv_append(k, v, planes, layout, slots, **turns, tensor_scales=scales)
        return bits(planes)

    def exact() -> Outputs:
        theirs = {n: p.cpu().clone() for n, p in planes.items()}
        turns = [t if t is None else t.cpu() for t in (cos, sin)]
        reference(k.cpu(), v.cpu(), theirs, layout, slots.cpu(), *turns, scales)
        return bits(theirs, lab.device)

    arguments = {"k": k, "v": v, "planes": planes, "slots": slots, "cos": cos, "sin": sin}
    return Trial(arguments, call, exact, within=dict.fromkeys(planes, 0.0), launches=True)


def bits(planes: Mapping[str, Tensor], device: torch.device | None = None) -> Outputs:
    """Planes as bytes, poison included: equal means that nothing else was touched."""
    return {n: p.contiguous().view(torch.uint8).to(device or p.device) for n, p in planes.items()}


def _kivi(lab: Lab, layout: Any, planes: dict[str, Tensor], pool: int, full: int) -> Trial:
    shape = (full + 2, layout.heads, layout.page, layout.dim)
    k, v = (lab.normal(*shape) for _ in range(2))
    at, rows = lab.order(pool)[:full].contiguous(), lab.order(full + 2)[:full].contiguous()

    def call(planes: dict[str, Tensor], pages: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Outputs:
        kivi_encode(planes, layout, pages, k, v, rows)
        return bits(planes)

    def exact() -> Outputs:
        theirs = {n: p.cpu().clone() for n, p in planes.items()}
        kv_kivi.write(theirs, at.cpu(), k.cpu()[rows.cpu()], v.cpu()[rows.cpu()])
        return bits(theirs, lab.device)

    arguments = {"planes": planes, "pages": at, "k": k, "v": v, "rows": rows}
    return Trial(arguments, call, exact, within=dict.fromkeys(planes, 0.0), launches=True)


def _case(name: str, format: str, page: int, tokens: int, kv_heads: int = 2, dim: int = 128,
          rope: bool = True, timed: bool = False) -> Case:  # fmt: skip
    sizes = {"format": format, "page": page, "tokens": tokens, "kv_heads": kv_heads, "dim": dim, "rope": rope}
    token = float(pages.layout_of(format, page, kv_heads, dim).bytes_per_token())
    work = KERNELS[0].cost(tokens, kv_heads, dim, 8 * token / (2 * kv_heads * dim))
    return Case("kv_append", name, make, sizes, work, timed=timed)


CASES = (
    _case("one token", "bf16", 16, 1, 1, 64, False),
    *(_case(f"{f}, 37 tokens", f, 16, 37) for f in ("bf16", "fp8", "int8", "nvfp4")),
    _case("fp8, pages of 64", "fp8", 64, 200),
    _case("kivi4, full pages", "kivi4", 64, 256),
    _case("kivi2, full pages", "kivi2", 128, 256),
    _case("bf16, 8k tokens", "bf16", 64, 8192, 8, timed=True),
    _case("fp8, 8k tokens", "fp8", 64, 8192, 8, timed=True),
    _case("nvfp4, 8k tokens", "nvfp4", 64, 8192, 8, timed=True),
    _case("kivi4, 8k tokens", "kivi4", 64, 8192, 8, timed=True),
)
