"""Attention straight from the definition, in float64: the oracle of the other forms.

softmax(q·kᵀ)·v per row and head (Vaswani et al. 2017, eq. 1; the 1/√d factor is already in ``q``), with
grouped query heads (Ainslie et al. 2023), causal, tree (Miao et al. 2023, §4) or sliding-window mask and
optional soft-cap (Gemma 2, §2). It loops over spans and shares no mask code with the fast forms, because it
is read more often than it is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.attention.spans import check_shape, check_span, shift, slot_rows
from workbench.engine.seams import AttentionOp, AttentionShape, AttentionSpan
from workbench.spec.technique import TechniqueSpec


@dataclass(frozen=True)
class Config:
    """The definition has no options."""


SPEC = TechniqueSpec(
    id="reference",
    title="Reference attention",
    family="attention",
    seam="attention",
    kind="exact",
    summary="Attention in float64, row by row from the definition: slow, the judge of the fast forms.",
    paper="Vaswani et al. 2017, Attention Is All You Need, eq. 1",
    stages=("attention",),
    claims_slot=("attention",),
)


def attention_mask(span: AttentionSpan, shape: AttentionShape) -> Tensor:
    """Boolean ``[n_new, start + n_new]``: True where row ``i`` may see slot ``s``.

    Committed slots are at the positions right before the span's first row.
    """
    lineage: list[set[int]] = []
    for i in range(span.n_new):
        parent = i - 1 if span.parents is None else span.parents[i]
        lineage.append({i} | (lineage[parent] if parent >= 0 else set()))
    mask = torch.zeros(span.n_new, span.start + span.n_new, dtype=torch.bool)
    mask[:, : span.start] = True
    for i, seen in enumerate(lineage):
        mask[i, [span.start + j for j in seen]] = True
    if shape.window is not None:
        own = torch.tensor(list(span.positions))
        position = torch.cat([torch.arange(span.start) + shift(span), own])
        mask &= position > own[:, None] - shape.window
    return mask


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, soft_cap: float | None = None) -> Tensor:
    """Dense masked attention ``[T, Hq, D]`` in the dtype of the inputs.

    ``q`` [T, Hq, D] scaled; ``k``, ``v`` [n, Hkv, D]; ``mask`` bool [T, n]. Rows that see nothing give
    exactly 0, and values under the mask never enter the sum, NaN included.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1) for t in (k, v))
    s = q.transpose(0, 1) @ k.transpose(1, 2)
    if soft_cap is not None:
        s = soft_cap * torch.tanh(s / soft_cap)
    hidden = ~mask
    p = s.masked_fill(hidden, float("-inf")).softmax(-1).masked_fill(hidden, 0.0)
    unseen = ~mask.any(0)
    return (p @ v.masked_fill(unseen[None, :, None], 0.0)).transpose(0, 1)


@dataclass(frozen=True)
class ReferencePlan:
    """Per span: its rows' first index, its flat pool slots (int64 [n]) and its mask (bool [n_new, n])."""

    shape: AttentionShape
    parts: tuple[tuple[int, Tensor, Tensor], ...]


class ReferenceAttention:
    """The definition behind the attention seam: every span dense, in float64, whatever the dtypes given."""

    name = "reference"

    def prepare(
        self, spans: Sequence[AttentionSpan], shape: AttentionShape, previous: Any = None
    ) -> ReferencePlan:
        """Masks and slots of every span; ``previous`` is not needed.

        Raises :class:`WrongShape` or :class:`InvariantError` for spans or shapes that contradict themselves.
        """
        check_shape(shape)
        parts, row = [], 0
        for i, span in enumerate(spans):
            check_span(i, span, shape.page_size)
            slots = slot_rows(span.table, shape.page_size, range(span.start + span.n_new))
            parts.append((row, torch.from_numpy(slots), attention_mask(span, shape)))
            row += span.n_new
        return ReferencePlan(shape, tuple(parts))

    def run(self, plan: ReferencePlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[T, Hq*D]`` in ``q``'s dtype, computed in float64. Shapes as in the seam."""
        page = plan.shape.page_size
        out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
        for first, slots, mask in plan.parts:
            slots, mask = slots.to(q.device), mask.to(q.device)
            keys, values = (t[slots // page, :, slots % page].double() for t in (k, v))
            # Each row alone over the tokens it sees, so that its bits do not depend on how its block was cut.
            for row, seen in enumerate(mask, first):
                here = slice(row, row + 1)
                visible = seen[seen].unsqueeze(0)
                out[here] = attend(q[here].double(), keys[seen], values[seen], visible, plan.shape.soft_cap)
        return out.flatten(1).to(q.dtype)


def bind(config: Config, context: Any) -> AttentionOp:
    """The oracle; it computes in float64 whatever numerics class the context asks for."""
    return ReferenceAttention()
