"""Paged decode: every format against float64, then a step of 16 long sequences, and one very long one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.kernels.attention.paged_builds import cost
from workbench.kernels.attention.paged_decode import OpenPages, paged_decode, reference
from workbench.kernels.bench import pages
from workbench.kernels.bench.baselines import gathered_sdpa
from workbench.kernels.bench.case import Case, Goal, Lab, Outputs, Relation, Trial

NAME = "paged_decode"


def make(lab: Lab, *, format: str, page: int, lengths: Any, heads: int, kv_heads: int, dim: int,
         **options: Any) -> Trial:  # fmt: skip
    """Queries of one step over a fresh cache. KIVI sequences end with whole pages, the open one is empty."""
    cache = pages.filled(lab, format, page, kv_heads, dim, lengths)
    q = lab.normal(len(lengths), heads, dim)
    arguments: dict[str, Any] = dict(
        q=q, planes=cache.planes, table=cache.table, lengths=cache.lengths, longest=max(lengths), **options
    )
    if format.startswith("kivi"):
        arguments["open_pages"] = _no_open_pages(cache, kv_heads, page, dim)

    def call(q: Tensor, planes: Any, table: Tensor, lengths: Tensor, **more: Any) -> Outputs:
        found = paged_decode(q, planes, cache.layout, table, lengths, **cache.options, **more)
        return {"out": found.out, "lse": found.lse}

    def exact() -> Outputs:
        masks = {n: options[n] for n in ("window", "soft_cap") if n in options}
        found = reference(q, *cache.decoded(), cache.table, cache.lengths, **masks)
        return {"out": found[0], "lse": found[1]}

    return Trial(
        arguments,
        call,
        exact,
        plain=lambda: {"out": _plain(q, cache, options)},
        within={"lse": 1e-3},  # scores of bf16 queries, summed by the tensor cores
        baselines={"gather + SDPA": gathered_sdpa} if format == "bf16" and len(set(lengths)) == 1 else {},
    )


def _plain(q: Tensor, cache: pages.Cache, options: Any) -> Tensor:
    """The same attention in torch operations of the query's dtype."""
    out, page, group = torch.zeros_like(q), cache.layout.page, q.shape[1] // cache.layout.heads
    keys, values = cache.decoded()
    window, cap = options.get("window"), options.get("soft_cap")
    for b, n in enumerate(cache.lengths.tolist()):
        if not n:
            continue
        seen = torch.arange(max(0, n - window) if window else 0, n, device=q.device)
        at = cache.table[b].long()[seen // page], slice(None), seen % page
        k, v = (x[at].to(q.dtype).repeat_interleave(group, 1) for x in (keys, values))
        s = (q[b].unsqueeze(1) @ k.permute(1, 2, 0))[:, 0] * q.shape[-1] ** -0.5
        s = cap * torch.tanh(s / cap) if cap else s
        out[b] = (s.softmax(-1).unsqueeze(1) @ v.transpose(0, 1))[:, 0]
    return out


def _no_open_pages(cache: pages.Cache, heads: int, page: int, dim: int) -> OpenPages:
    batch, device = len(cache.lengths), cache.lengths.device
    k = torch.full((batch, heads, page, dim), torch.nan, dtype=torch.bfloat16, device=device)
    row = torch.arange(batch, dtype=torch.int32, device=device)
    return OpenPages(k, k.clone(), cache.lengths.clone(), row)


def _case(name: str, format: str, page: int, lengths: Any, heads: int = 8, kv_heads: int = 2, dim: int = 128,
          *goals: Goal, timed: bool = False, variants: Any = None, **options: Any) -> Case:  # fmt: skip
    sizes = {"format": format, "page": page, "lengths": lengths, "dim": dim, **options}
    sizes |= {"heads": heads, "kv_heads": kv_heads}
    bits = float(8 * pages.layout_of(format, page, kv_heads, dim).bytes_per_token()) / (2 * kv_heads * dim)
    work = cost(1, sum(lengths), heads, kv_heads, dim, bits)
    return Case(NAME, name, make, sizes, work, timed=timed, variants=variants or {}, goals=goals)


def _step(format: str, page: int, *goals: Goal, **more: Any) -> Case:
    """A step of 16 sequences of 8,192 tokens, heads as in Llama 3 8B."""
    return _case(f"{format} page {page}, B16 L8k", format, page, [8192] * 16, 32, 8, 128, *goals,
                 timed=True, **more)  # fmt: skip


FORMATS = ("bf16", "fp8", "int8", "nvfp4")
RAGGED = [1, 0, 130, 64, 63, 65, 300]
CASES = (
    _case("one token", "bf16", 16, [1], 2, 1, 64),
    *(_case(f"{f} page {p}, ragged", f, p, RAGGED) for f in FORMATS for p in (16, 64)),
    _case("bf16 page 128, 16 heads a KV head", "bf16", 128, [500, 77], 16, 1),
    _case("bf16 hd256", "bf16", 64, [500, 77], 8, 4, 256),
    _case("window and soft-cap", "bf16", 64, RAGGED, window=70, soft_cap=5.0),
    _case("kivi4", "kivi4", 64, [128, 0, 64, 576]),
    _case("kivi2", "kivi2", 128, [128, 0, 640]),
    _case("many splits", "bf16", 64, [9001, 20000]),
    _step("bf16", 64, Goal(3.4, 3.8, 4.1),
          variants={"by pointers": {"tma": False}, "no split": {"chunk": 8192}}),
    _step("bf16", 16, Goal(3.0, 3.6, 3.9)),
    _step("fp8", 64, Goal(2.8, 3.4, 3.8), variants={"by pointers": {"tma": False}}),
    _step("fp8", 16),
    _step("int8", 64),
    _step("nvfp4", 64),
    _step("kivi4", 128),
    _case("bf16 page 64, B1 L128k", "bf16", 64, [131072], 32, 8, 128, Goal(3.2, 3.7, 4.0), timed=True,
          variants={"no split": {"chunk": 131072}}),
)  # fmt: skip
RELATIONS = (
    Relation("page 64 against page 16", "bf16 page 64, B16 L8k", "bf16 page 16, B16 L8k"),
    Relation("FP8 KV against bf16, tokens/s", "fp8 page 64, B16 L8k", "bf16 page 64, B16 L8k",
             Goal(1.6, 1.6, 1.6)),
    Relation("NVFP4 KV against bf16, tokens/s", "nvfp4 page 64, B16 L8k", "bf16 page 64, B16 L8k"),
)  # fmt: skip
