"""Ragged batches on a poisoned, permuted page pool, shared by the attention tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from workbench.attention.reference import ReferenceAttention, attention_mask
from workbench.engine.seams import AttentionOp, AttentionShape, AttentionSpan


@dataclass
class Case:
    """One step. Slots that no row of any span may see hold ``poison``."""

    spans: list[AttentionSpan]
    shape: AttentionShape
    q: Tensor
    k: Tensor
    v: Tensor

    def to(self, dtype: torch.dtype) -> Case:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        q, k, v = self.q.to(dtype).to(wide), self.k.to(dtype), self.v.to(dtype)
        return Case(self.spans, self.shape, q, k, v)

    def run(self, op: AttentionOp) -> Tensor:
        return op.run(op.prepare(self.spans, self.shape), self.q, self.k.clone(), self.v.clone())

    def oracle(self) -> Tensor:
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        return Case(self.spans, self.shape, q, k, v).run(ReferenceAttention())


def tree_positions(start: int, parents: list[int]) -> list[int]:
    depth: list[int] = []
    for p in parents:
        depth.append(0 if p < 0 else depth[p] + 1)
    return [start + d for d in depth]


def random_span(r: random.Random, kind: str, prefix: list[int], ids: list[int], page: int) -> AttentionSpan:
    n = {"decode": 1, "chain": r.randint(2, 5), "tree": r.randint(2, 9), "chunk": r.randint(17, 60)}[kind]
    start = len(prefix) * page + r.randint(0, 2 * page + 3)
    spare = r.choice([0, 1])
    own = -(-(start + n) // page) - len(prefix) + spare
    parents = [r.randint(-1, i - 1) for i in range(n)] if kind == "tree" else None
    positions = tree_positions(start, parents) if parents else list(range(start, start + n))
    return AttentionSpan(n, start, prefix + [ids.pop() for _ in range(own)], positions, parents)


def random_case(
    seed: int,
    kinds: list[str],
    *,
    page: int,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 40,
    window: int | None = None,
    soft_cap: float | None = None,
    shared: int = 0,
    scatter: bool = True,
    poison: float = float("nan"),
) -> Case:
    """Spans of ``kinds`` behind ``shared`` pages of common prefix, on a pool of permuted pages."""
    r = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    ids = list(range(shared + 3 + len(kinds) * (68 // page + 5)))
    pages = len(ids)
    if scatter:
        r.shuffle(ids)
    prefix = [ids.pop() for _ in range(shared)]
    spans = [random_span(r, kind, prefix, ids, page) for kind in kinds]
    shape = AttentionShape(kv_heads * group, kv_heads, head_dim, page, window, soft_cap)
    q = torch.randn(sum(s.n_new for s in spans), shape.heads, head_dim, generator=g) / head_dim**0.5
    k, v = torch.randn(2, pages, kv_heads, page, head_dim, generator=g)
    seen = torch.zeros(pages, page, dtype=torch.bool)
    for span in spans:
        slots = attention_mask(span, shape).any(0).nonzero()[:, 0]
        seen[torch.tensor(span.table)[slots // page], slots % page] = True
    for t in (k, v):
        t.masked_fill_(~seen[:, None, :, None], poison)
    return Case(spans, shape, q, k, v)


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    return random_case


@pytest.fixture(scope="session")
def depths_of() -> Callable[[int, list[int]], list[int]]:
    """Absolute positions of the rows of a draft tree."""
    return tree_positions
