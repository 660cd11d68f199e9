"""From the scheduler's selection to plain spans: which tokens, where, seeing what, with which logits."""

from __future__ import annotations

from collections.abc import Mapping

from workbench.engine.scheduler import Selection
from workbench.engine.seams import DraftTree, SpanPlan
from workbench.engine.sequence import Sequence


def plan_spans(selection: Selection, drafts: Mapping[int, DraftTree]) -> list[tuple[Sequence, SpanPlan]]:
    """Spans of a step, decodes first; a draft's nodes follow the last committed token in slot order."""
    wanted = [(s, 1) for s in selection.decodes] + selection.prefills
    return [(seq, _span(seq, n, drafts.get(seq.id))) for seq, n in wanted]


def _span(seq: Sequence, n: int, tree: DraftTree | None) -> SpanPlan:
    start = seq.computed
    tokens = tuple(seq.tokens[start : start + n])
    positions = tuple(range(start, start + n))
    parents = None
    scoring = seq.params.prompt_logprobs is not None and start < seq.prompt_len
    logits = n if scoring else int(start + n == len(seq.tokens))
    if tree is not None:
        tokens += tree.tokens
        positions += tuple(start + d for d in tree.depths())
        parents = None if tree.is_chain else (-1, *(p + 1 for p in tree.parents))
        logits = len(tokens)
    return SpanPlan(seq.id, tokens, positions, start, tuple(tuple(t) for t in seq.tables), logits, parents)
