"""Fast attention in plain torch over a page pool: the form behind the ``sdpa`` catalogue entry.

Short spans (decodes, drafts) are computed page by page where the pages lie, long chunks densely; both share
one plan per step. Mixed batches are ordinary. Fast class: the order of summation depends on tables and batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.attention.dense import DensePlan, plan_dense, run_dense
from workbench.attention.fixed import fast_fixed
from workbench.attention.scratch import Scratch
from workbench.attention.short import ShortPlan, plan_short, run_short
from workbench.attention.spans import check_shape, check_span
from workbench.engine.seams import AttentionShape, AttentionSpan, FixedRead

SHORT = 16
"""Longest span that stays on the page path; beyond it the products are large enough to pay for a gather."""


@dataclass
class PagesPlan:
    """One step: ``rows`` query rows, its short spans as one edge list, and each long chunk."""

    shape: AttentionShape
    rows: int
    short: ShortPlan | None
    dense: tuple[DensePlan, ...]


class TorchPages:
    """Page-pool attention; keeps its score buffers between calls. Not for autograd.

    One worker thread at a time: buffers are shared by all plans of this op.
    """

    name = "torch-pages"

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._scratch = Scratch()

    def prepare(
        self, spans: Sequence[AttentionSpan], shape: AttentionShape, previous: Any = None
    ) -> PagesPlan:
        """Plan a step; reuses (and changes) ``previous`` when only lengths moved inside the last pages.

        Raises :class:`WrongShape` or :class:`InvariantError` for spans or shapes that contradict themselves.
        """
        old = previous if isinstance(previous, PagesPlan) and previous.shape == shape else None
        if old is None:
            check_shape(shape)
        short: list[AttentionSpan] = []
        rows: list[int] = []
        dense = []
        row = 0
        for i, span in enumerate(spans):
            check_span(i, span, shape.page_size)
            if span.n_new > SHORT:
                dense.append(plan_dense(row, span, shape, self._device))
            elif span.n_new:
                short.append(span)
                rows.append(row)
            row += span.n_new
        plan = plan_short(short, rows, shape, self._device, old.short if old else None) if short else None
        return PagesPlan(shape, row, plan, tuple(dense))

    def run(self, plan: PagesPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[T, Hq*D]`` in ``q``'s dtype; products in the K/V dtype, softmax in at least float32.

        ``q`` [T, Hq, D] scaled; ``k``, ``v`` [N, Hkv, P, D], any strides (contiguous pages are not copied).
        Unused slots of ``k`` and ``v`` may be zeroed, nothing else of them changes.
        """
        x = q.to(k.dtype)
        pieces = []
        if plan.short is not None:
            pieces = run_short(plan.short, x, k, v, plan.shape, self._scratch, q.dtype)
        if not plan.dense and len(pieces) == 1:
            return pieces[0][1]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for rows, result in pieces:
            out.flatten(1).index_copy_(0, rows, result)
        for chunk in plan.dense:
            run_dense(chunk, x, k, v, out)
        return out.flatten(1)

    def fixed(self, tables: Tensor, first: Tensor, rows: int, shape: AttentionShape) -> FixedRead:
        """See :class:`workbench.engine.seams.FixedAttention`."""
        return fast_fixed(tables, first, rows, shape)

    def nbytes(self) -> int:
        """Bytes of buffers held between calls."""
        return self._scratch.nbytes()
