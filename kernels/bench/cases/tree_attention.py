"""Tree attention over pages: chains, branching trees and rows that only look back, then a wide draft step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.kernels.attention.tree_attention import KERNEL, reference, tree_attention
from workbench.kernels.bench import pages
from workbench.kernels.bench.case import Case, Lab, Outputs, Trial
from workbench.kernels.layouts.tree import TreeRows, chain, looking_back, tree_rows, unpack


def make(lab: Lab, *, format: str, page: int, starts: Any, rows: int, shape: str, heads: int, kv_heads: int,
         dim: int) -> Trial:  # fmt: skip
    """``rows`` rows a sequence (a chain, a binary tree, or rows that look back) over ``starts`` tokens."""
    own = 0 if shape == "back" else rows
    cache = pages.filled(lab, format, page, kv_heads, dim, [n + own for n in starts])
    parents = {"chain": chain(rows), "tree": tuple((i - 1) // 2 if i else -1 for i in range(rows))}
    counts = [rows] * len(starts)
    made = looking_back(counts) if shape == "back" else tree_rows([parents[shape]] * len(starts))
    made = made.to(lab.device)
    before = torch.tensor(list(starts), dtype=torch.int32, device=lab.device)
    q = lab.normal(rows * len(starts), heads, dim)
    arguments: dict[str, Any] = {"q": q, "planes": cache.planes, "table": cache.table, "starts": before}
    arguments |= {"rows": made, "longest": max(starts)}

    def call(q: Tensor, planes: Any, table: Tensor, starts: Tensor, rows: Any, **more: Any) -> Outputs:
        found = tree_attention(q, planes, cache.layout, table, starts, rows, **more)
        return {"out": found.out, "lse": found.lse}

    def exact() -> Outputs:
        found = reference(q, *cache.decoded(), cache.table, before, made)
        return {"out": found[0], "lse": found[1]}

    return Trial(
        arguments,
        call,
        exact,
        plain=lambda: {"out": _plain(q, cache, before, made)},
        within={"lse": 1e-3},  # scores of bf16 queries, summed by the tensor cores
        launches=True,  # blocks of rows are listed once a step, not once a layer
    )


def _plain(q: Tensor, cache: pages.Cache, starts: Tensor, rows: TreeRows) -> Tensor:
    """The same attention in torch operations of the query's dtype."""
    out, page, group = torch.zeros_like(q), cache.layout.page, q.shape[1] // cache.layout.heads
    keys, values = cache.decoded()
    for b, start in enumerate(starts.tolist()):
        first, last, own = int(rows.first[b]), int(rows.first[b + 1]), int(rows.keys[b])
        slots = torch.arange(start + own, device=q.device)
        at = cache.table[b].long()[slots // page], slice(None), slots % page
        k, v = (x[at].to(q.dtype).repeat_interleave(group, 1) for x in (keys, values))
        s = torch.einsum("ihd,nhd->hin", q[first:last], k) * q.shape[-1] ** -0.5
        seen = torch.ones(last - first, start, dtype=torch.bool, device=q.device)
        seen = torch.cat([seen, unpack(rows.words[first:last], own)], 1)
        p = s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        out[first:last] = torch.einsum("hin,nhd->ihd", p, v)
    return out


def _case(name: str, format: str, page: int, starts: Any, rows: int, shape: str, heads: int = 8,
          kv_heads: int = 2, timed: bool = False) -> Case:  # fmt: skip
    sizes = {"format": format, "page": page, "starts": starts, "rows": rows, "shape": shape, "dim": 128}
    sizes |= {"heads": heads, "kv_heads": kv_heads}
    bits = float(8 * pages.layout_of(format, page, kv_heads, 128).bytes_per_token()) / (2 * kv_heads * 128)
    work = KERNEL.cost(len(starts), max(starts), rows, heads, kv_heads, 128, bits)
    return Case("tree_attention", name, make, sizes, work, timed=timed)


CASES = (
    _case("a chain of 3", "bf16", 16, [5], 3, "chain", 2, 1),
    _case("a tree of 40", "bf16", 64, [130, 0, 63], 40, "tree"),
    _case("looking back", "bf16", 16, [130, 64], 9, "back"),
    _case("fp8, a tree of 20", "fp8", 64, [300, 1], 20, "tree"),
    _case("int8, a chain of 70", "int8", 16, [65, 200], 70, "chain"),
    _case("long context", "bf16", 64, [9000], 64, "tree"),
    _case("bf16, B8 L8k, trees of 64", "bf16", 64, [8192] * 8, 64, "tree", 32, 8, timed=True),
    _case("fp8, B8 L8k, trees of 64", "fp8", 64, [8192] * 8, 64, "tree", 32, 8, timed=True),
    _case("bf16, B16 L8k, chains of 4", "bf16", 64, [8192] * 16, 4, "chain", 32, 8, timed=True),
)
