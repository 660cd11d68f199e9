"""From the scheduler's batch to plain spans: which tokens, where, seeing what, with which logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from workbench.engine.draft_seams import DraftTree
from workbench.engine.scheduler import Batch
from workbench.engine.seams import SpanPlan
from workbench.engine.sequence import Sequence


def plan_spans(batch: Batch, drafts: Mapping[int, DraftTree]) -> list[tuple[Sequence, SpanPlan]]:
    """Spans of a step, decodes first; a draft's nodes follow the last committed token in slot order."""
    wanted = [(s, 1) for s in batch.decodes] + batch.prefills
    return [(seq, _span(seq, n, drafts.get(seq.id))) for seq, n in wanted]


def prefill_span(seq: Sequence, n: int, logits: int) -> SpanPlan:
    """The next ``n`` known tokens of a sequence."""
    start = seq.computed
    return SpanPlan(
        seq.id,
        tuple(seq.tokens[start : start + n]),
        tuple(range(start - seq.shift, start - seq.shift + n)),
        start,
        tuple(tuple(t) for t in seq.tables),
        logits,
        slots=tuple(seq.used(g) for g in range(len(seq.tables))) if seq.dropped else None,
        decodes=start >= seq.prompt_len,
    )


def _span(seq: Sequence, n: int, tree: DraftTree | None) -> SpanPlan:
    start = seq.computed
    scoring = seq.params.prompt_logprobs is not None and start < seq.prompt_len
    span = prefill_span(seq, n, n if scoring else int(start + n == len(seq.tokens)))
    if tree is None:
        return span
    return replace(
        span,
        tokens=span.tokens + tree.tokens,
        positions=span.positions + tuple(span.positions[0] + d for d in tree.depths()),
        parents=None if tree.is_chain else (-1, *(p + 1 for p in tree.parents)),
        logits=n + len(tree.tokens),
    )
