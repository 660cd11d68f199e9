"""The edge list of a step: which page meets which query rows, as index tensors shared by all layers.

An edge is (page, span). For each page the query rows of all its owners are stacked, so that a page is read
once however many sequences share it. Rows of the products are then put in order per query row, softmax
runs over ``nb * P`` slots, and the weights go back the same way: K and V never move, only scores do
(3 of them per token and KV head, against 128 numbers of K and V at head size 64).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.attention.runs import Run
from workbench.attention.spans import Ints

BUCKET_GAIN = 1 << 15
"""Score elements that padding must waste before shorter rows get a softmax of their own."""


@dataclass(frozen=True)
class Member:
    """One span on the page path: its place in the step and the pages it reads.

    ``row`` is its first query row, ``first`` the logical number of ``pages[0]``.
    """

    row: int
    n_new: int
    first: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Rows whose softmax is padded to the same number of pages ``nb``.

    ``members``: indices of their spans. ``rows`` int64 [R]: query rows of the step. ``edges`` int64
    [R * Hq * nb]: for each row, head and page the row of the products that holds it, or ``total`` (the zero
    row) where the row has fewer pages.
    """

    members: tuple[int, ...]
    nb: int
    rows: Ints
    edges: Ints


@dataclass(frozen=True)
class Edges:
    """``query`` int64 [total]: which (row, head) of the step each product row multiplies;
    ``weight`` int64 [total]: which softmax block (P weights) it takes back."""

    buckets: tuple[Bucket, ...]
    query: Ints
    weight: Ints
    total: int


def stack(members: Sequence[Member], group: int) -> tuple[dict[int, int], list[int]]:
    """Rows per KV head stacked on each page, and each edge's offset in its page's stack (span-major)."""
    heights: dict[int, int] = {}
    offsets: list[int] = []
    for m in members:
        rows = m.n_new * group
        for page in m.pages:
            at = heights.get(page, 0)
            offsets.append(at)
            heights[page] = at + rows
    return heights, offsets


def _buckets(members: Sequence[Member], heads: int, page_size: int) -> list[list[int]]:
    """Indices of members, by falling number of pages, split where padding would waste much."""
    order = sorted(range(len(members)), key=lambda i: -len(members[i].pages))
    nb = len(members[order[0]].pages)
    if len(members[order[-1]].pages) == nb:
        return [list(range(len(members)))]
    out: list[list[int]] = [[]]
    waste = 0
    for i in order:
        m = members[i]
        waste += (nb - len(m.pages)) * m.n_new * heads * page_size
        if waste > BUCKET_GAIN and 2 * len(m.pages) <= nb:
            out.append([])
            waste, nb = 0, len(m.pages)
        out[-1].append(i)
    return [sorted(b) for b in out]


def build_edges(
    members: Sequence[Member],
    offsets: Sequence[int],
    runs: Sequence[Run],
    total: int,
    heads: int,
    kv_heads: int,
    page_size: int,
) -> Edges:
    """Index arrays of the step; everything 64-bit, because rows times strides pass 2**31 in large pools."""
    group = heads // kv_heads
    ids = np.concatenate([np.array(r.pages, dtype=np.int64) for r in runs])
    tall = np.repeat(np.array([r.height for r in runs], dtype=np.int64), [len(r.pages) for r in runs])
    base = np.concatenate(
        [r.row + np.arange(len(r.pages), dtype=np.int64) * (kv_heads * r.height) for r in runs]
    )
    order = np.argsort(ids, kind="stable")
    counts = np.array([len(m.pages) for m in members])
    # A gathered page may also lie idle inside a view; gathered runs come last, and the last one counts.
    wanted = np.array([p for m in members for p in m.pages])
    where = order[np.searchsorted(ids, wanted, side="right", sorter=order) - 1]
    edge_base, edge_tall = base[where] + np.array(offsets, dtype=np.int64), tall[where]
    ends = np.cumsum(counts)
    head, member = np.arange(kv_heads)[None, :, None, None], np.arange(group)[None, None, :, None]
    # One row more than there are: padding edges name the zero row, and may write there.
    query, weight = np.zeros((2, total + 1), dtype=np.int64)
    buckets, block = [], 0
    for chosen in _buckets(members, heads, page_size):
        nb = int(counts[chosen].max())
        column = np.arange(nb)
        at = np.minimum((ends - counts)[chosen][:, None] + column, len(where) - 1)
        n_new = np.array([members[i].n_new for i in chosen])
        of = np.repeat(np.arange(len(chosen)), n_new)
        t = np.concatenate([np.arange(n) for n in n_new])
        rows = np.array([members[i].row for i in chosen], dtype=np.int64)[of] + t
        b, m = edge_base[at][of], edge_tall[at][of]
        edges = b[:, None, None, :] + head * m[:, None, None, :] + t[:, None, None, None] * group + member
        if counts[chosen].min() < nb:
            edges = np.where((column < counts[chosen][:, None])[of][:, None, None, :], edges, total)
        query[edges] = (rows[:, None] * heads + np.arange(heads)).reshape(-1, kv_heads, group, 1)
        weight[edges] = block + np.arange(edges.size, dtype=np.int64).reshape(edges.shape)
        block += edges.size
        buckets.append(Bucket(tuple(chosen), nb, rows, edges.reshape(-1)))
    return Edges(tuple(buckets), query[:total], weight[:total], total)
