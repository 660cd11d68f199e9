"""Decodes and drafts of the fast form: the step's query rows against the pages they share, in place.

:func:`plan_short` builds the edge list once per set of tables, :func:`refresh` only rewrites the masks when
lengths moved inside the last pages, :func:`run_short` is what a layer costs: two products per run, two
reorderings of scores, one softmax, one sum over pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.attention.edges import Member, build_edges, stack
from workbench.attention.masks import fill_hidden
from workbench.attention.runs import Run, plan_runs
from workbench.attention.scratch import Scratch
from workbench.attention.slots import dead_tails, grow_tails, hidden_heads, zero_slots
from workbench.attention.softmax import weights
from workbench.attention.spans import first_visible
from workbench.engine.seams import AttentionShape, AttentionSpan


@dataclass
class Part:
    """Rows sharing one softmax shape: see :class:`workbench.attention.edges.Bucket`."""

    spans: tuple[int, ...]
    origins: tuple[int, ...]
    nb: int
    rows: Tensor
    edges: Tensor
    columns: Tensor
    hidden: Tensor
    edge: int = 0


@dataclass
class ShortPlan:
    """The page path of a step. ``tails`` maps a page to the first of its slots known to be zeroed; ``scrub``
    are the slots still to zero in every layer's K and V; ``heads`` are slots behind every window."""

    members: tuple[Member, ...]
    runs: list[Run]
    total: int
    query: Tensor
    weight: Tensor
    parts: list[Part]
    tails: dict[int, int]
    scrub: tuple[Tensor, Tensor] | None
    heads: dict[int, int]
    gathered: list[tuple[Tensor, Tensor, Tensor] | None]
    ran: bool = False


def members_of(
    spans: Sequence[AttentionSpan], rows: Sequence[int], shape: AttentionShape
) -> tuple[Member, ...]:
    """Each span's visible pages: from the first one inside its window to the one of its last new row."""
    page, out = shape.page_size, []
    for span, row in zip(spans, rows, strict=True):
        first = first_visible(span, shape.window) // page
        last = (span.start + span.n_new - 1) // page
        out.append(Member(row, span.n_new, first, tuple(span.table[first : last + 1])))
    return tuple(out)


def refresh(plan: ShortPlan, spans: Sequence[AttentionSpan], shape: AttentionShape) -> None:
    """Rewrite the masks for ``spans``, whose members are those of ``plan``."""
    for part in plan.parts:
        own = [spans[i] for i in part.spans]
        part.edge = fill_hidden(part.hidden, part.columns, own, part.origins, shape.window)


def plan_short(
    spans: Sequence[AttentionSpan],
    rows: Sequence[int],
    shape: AttentionShape,
    device: torch.device,
    previous: ShortPlan | None,
) -> ShortPlan:
    """Plan ``spans`` (each with at least one row) whose query rows begin at ``rows``; reuses ``previous``
    when pages and row counts are the same."""
    members = members_of(spans, rows, shape)
    heads = hidden_heads(spans, members, shape)
    if previous is not None and members == previous.members and heads.keys() == previous.heads.keys():
        if heads != previous.heads:
            previous.heads = heads
            previous.gathered = _gathered(previous.runs, heads, device)
        refresh(previous, spans, shape)
        previous.scrub = None
        if previous.ran:
            grow_tails(previous.tails, spans, members, shape.page_size)
        else:  # its tails were never zeroed, and lengths have moved
            previous.tails, previous.scrub = _scrub(spans, members, shape, {}, device)
        return previous
    page = shape.page_size
    heights, offsets = stack(members, shape.heads // shape.kv_heads)
    page_bytes = 4 * shape.kv_heads * page * shape.head_dim
    runs, total = plan_runs(heights, shape.kv_heads, page_bytes, heads)
    edges = build_edges(members, offsets, runs, total, shape.heads, shape.kv_heads, page)
    parts = []
    for b in edges.buckets:
        columns = torch.arange(b.nb * page, device=device)
        hidden = torch.empty(len(b.rows), b.nb * page, dtype=torch.bool, device=device)
        origins = tuple(members[i].first * page for i in b.members)
        rows_of, edges_of = (torch.from_numpy(a).to(device) for a in (b.rows, b.edges))
        parts.append(Part(b.members, origins, b.nb, rows_of, edges_of, columns, hidden))
    known = previous.tails if previous is not None and previous.ran else {}
    tails, scrub = _scrub(spans, members, shape, known, device)
    query, weight = (torch.from_numpy(a).to(device) for a in (edges.query, edges.weight))
    gathered = _gathered(runs, heads, device)
    plan = ShortPlan(members, runs, total, query, weight, parts, tails, scrub, heads, gathered)
    refresh(plan, spans, shape)
    return plan


def _scrub(
    spans: Sequence[AttentionSpan],
    members: Sequence[Member],
    shape: AttentionShape,
    known: dict[int, int],
    device: torch.device,
) -> tuple[dict[int, int], tuple[Tensor, Tensor] | None]:
    """The zeroed tails after the next run, and what that run has still to zero."""
    tails, slots = dead_tails(spans, members, shape.page_size, known)
    return tails, None if slots is None else (slots[0].to(device), slots[1].to(device))


def _gathered(
    runs: Sequence[Run], heads: dict[int, int], device: torch.device
) -> list[tuple[Tensor, Tensor, Tensor] | None]:
    """Per run None for a view, else its page ids and the (page, slot) pairs to zero in the copy."""
    out: list[tuple[Tensor, Tensor, Tensor] | None] = []
    for run in runs:
        if run.view:
            out.append(None)
            continue
        dead = [(i, s) for i, p in enumerate(run.pages) for s in range(heads.get(p, 0))]
        pairs = torch.tensor(dead, dtype=torch.int64, device=device).reshape(-1, 2)
        out.append((torch.tensor(run.pages, device=device), pairs[:, 0], pairs[:, 1]))
    return out


def _pages(run: Run, gathered: tuple[Tensor, Tensor, Tensor] | None, pool: Tensor) -> Tensor:
    """The run's K or V as ``[n * Hkv, P, D]``: a view of the pool, or a copy without hidden slots."""
    if gathered is None:
        return pool[run.pages[0] : run.pages[-1] + 1].reshape(-1, *pool.shape[2:])
    ids, page, slot = gathered
    copy = pool.index_select(0, ids)
    if len(page):
        zero_slots(copy, page, slot)
    return copy.view(-1, *pool.shape[2:])


def run_short(
    plan: ShortPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shape: AttentionShape,
    scratch: Scratch,
    dtype: torch.dtype,
) -> list[tuple[Tensor, Tensor]]:
    """Return ``(rows, result [R, Hq*D])`` pairs in ``dtype``; ``q`` [T, Hq, D] in the K/V dtype."""
    plan.ran = True
    if plan.scrub is not None:
        zero_slots(k, *plan.scrub)
        zero_slots(v, *plan.scrub)
    page, dim = k.shape[2:]
    s = scratch.take("scores", plan.total + 1, page, k.dtype, k.device)
    stacked = q.reshape(-1, dim).index_select(0, plan.query)
    for run, gathered in zip(plan.runs, plan.gathered, strict=True):
        keys = _pages(run, gathered, k)
        a, b = run.row, run.row + len(keys) * run.height
        target = s[a:b].view(len(keys), run.height, page)
        torch.bmm(stacked[a:b].view(len(keys), run.height, dim), keys.transpose(1, 2), out=target)
    blocks = []
    for part in plan.parts:
        scores = s.index_select(0, part.edges).view(len(part.rows), shape.heads, -1)
        blocks.append(weights(scores, part.hidden[:, None, part.edge :], part.edge, shape).view(-1, page))
    w = (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).index_select(0, plan.weight)
    o = scratch.take("partial", plan.total + 1, dim, k.dtype, k.device)
    o[plan.total].zero_()
    for run, gathered in zip(plan.runs, plan.gathered, strict=True):
        values = _pages(run, gathered, v)
        a, b = run.row, run.row + len(values) * run.height
        target = o[a:b].view(len(values), run.height, dim)
        torch.bmm(w[a:b].view(len(values), run.height, page), values, out=target)
    wide = torch.promote_types(k.dtype, torch.float32)
    out = []
    for part in plan.parts:
        partial = o.index_select(0, part.edges).view(len(part.rows) * shape.heads, part.nb, dim)
        total = partial.sum(1, dtype=wide) if part.nb > 1 else partial
        out.append((part.rows, total.view(len(part.rows), -1).to(dtype)))
    return out
