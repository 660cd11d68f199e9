"""Teacher-forced logits of given tokens, through an engine's real codec, weights and attention.

The tokens before ``start`` are prefilled; the rows after them run a chunk at a time, so that they read the
context as the codec stores it. Blocks are cut where the scheduler would cut them (law 3). Nothing is sampled
and no request is added: use it on an engine that is otherwise idle.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.seams import StepPlan
from workbench.engine.sequence import Request, Sequence
from workbench.engine.spans import prefill_span
from workbench.spec.errors import CapacityError, RequestError

_ENLARGE = "Enlarge the KV pool (kv_pool_tokens) or score fewer tokens."
PREFILL = 512  # rows of a context block, so that a caller can stop between two


@dataclass(frozen=True)
class Scored:
    """Rows of ``n`` positions from ``begin``: logits [n, V] of the tokens that follow them, if wanted."""

    begin: int
    n: int
    logits: Tensor | None
    sequence: Sequence

    @property
    def targets(self) -> list[int]:
        """The tokens that the rows predict."""
        return self.sequence.tokens[self.begin + 1 : self.begin + 1 + self.n]


def score(
    engine: Engine,
    ids: Seq[int],
    start: int,
    chunk: int = 64,
    fill: Callable[[Sequence], None] | None = None,
) -> Generator[Scored, None, None]:
    """Forward ``ids``; every token from ``start`` on is predicted by one row of the logits given.

    With ``fill`` the context is not computed: it writes the KV of the first ``start - 1`` tokens to the slots
    of the sequence's tables. Each forward runs in inference mode, which never spans a ``yield``; closing the
    generator early frees its pages. Raises :class:`RequestError` for a start or chunk out of range,
    :class:`CapacityError` when the pool is too small.
    """
    steps = _steps(engine, ids, start, chunk, fill)
    try:
        while True:
            with torch.inference_mode():
                block = next(steps, None)
            if block is None:
                return
            yield block
    finally:
        with torch.inference_mode():
            steps.close()


def _steps(
    engine: Engine, ids: Seq[int], start: int, chunk: int, fill: Callable[[Sequence], None] | None
) -> Generator[Scored, None, None]:
    if not 1 <= start < len(ids) or chunk < 1:
        raise RequestError(
            f"Cannot score tokens {start} to {len(ids)} in chunks of {chunk}.",
            hint="Give at least one token of context and one to score.",
        )
    kv = engine.kv
    # What is scored follows the context as a question would: a KV selector acts between them.
    context = tuple(ids[: start - 1])
    request = Request("score", context, SamplingParams(max_tokens=0, prompt_logprobs=0), salt="score")
    seq = Sequence(id=0, request=request, sample=0, tokens=list(ids), budget=0)
    if not kv.admit(seq, len(ids)):
        raise CapacityError(
            f"Scoring {len(ids)} tokens needs {kv.pages_for(len(ids))} free pages of {kv.page_size}.",
            hint=_ENLARGE,
        )
    try:
        if fill is not None:
            fill(seq)
            kv.commit(seq, start - 1)
        while seq.computed < len(ids) - 1:
            yield _block(engine, seq, start - 1, chunk)
    finally:
        kv.release(seq)


def _block(engine: Engine, seq: Sequence, first: int, chunk: int) -> Scored:
    """One forward: a block of context rows, or a chunk of rows whose logits are wanted."""
    begin, scoring = seq.computed, seq.computed >= first
    n = min(chunk, len(seq.tokens) - 1 - begin) if scoring else min(PREFILL, first - begin)
    n = min(n, engine.scheduler.until_boundary(seq))
    engine.kv.extend(seq, begin + n)
    span = prefill_span(seq, n, n if scoring else 0)
    executor, selecting = engine.executor, engine.selecting
    prepared = executor.prepare(StepPlan(0, (span,)))
    out = executor.forward(prepared, queries=selecting.wants([(seq, span)]))
    engine.kv.commit(seq, begin + n)
    if not selecting.commit(seq, begin, range(n), out.queries):
        raise CapacityError("The pool has no pages for what the KV selector keeps.", hint=_ENLARGE)
    return Scored(begin, n, out.logits if scoring else None, seq)
