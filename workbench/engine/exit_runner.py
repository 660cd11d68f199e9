"""The first layers of the target as a drafter, on the target's own KV; the rest of it judges what they draft.

Elhoushi et al., "LayerSkip" (arXiv 2404.16710, section 4.3). K and V that the first layers write for a draft
lie where the target's do, and are the target's if the draft is accepted: committed tokens are never fed
again. The streams that leave the exit layer are kept until the step is over (the paper's exit query cache),
so that a pass of the target runs only the layers behind it on rows that were drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from workbench.engine.draft_seams import Drafter
from workbench.engine.executor import Executor, Prepared
from workbench.engine.exit_control import ExitControl
from workbench.engine.seams import SpanPlan, StepPlan
from workbench.engine.sequence import Sequence
from workbench.spec.errors import InvariantError


@runtime_checkable
class ExitDrafter(Drafter, Protocol):
    """A drafter that is the first ``exit_layers`` layers of its target."""

    exit_layers: int
    reuse: bool  # whether verification starts behind them on rows that were drafted

    def attach(self, runner: ExitRunner) -> None:
        """How it runs them."""
        ...

    def steer(self, control: ExitControl) -> None:
        """From now on a control says where they end, and how far drafts go."""
        ...


class Entry(NamedTuple):
    """Where a pass begins: ``states`` [T, H] of its rows enter the first of ``layers``; None: all run."""

    states: Tensor | None = None
    layers: range | None = None


@dataclass
class _Fed:
    """What a sequence was fed behind ``start`` tokens, and the streams that left ``layers`` layers."""

    start: int
    layers: int
    tokens: list[int] = field(default_factory=list)
    streams: list[Tensor] = field(default_factory=list)


class ExitRunner:
    """``executor`` holds the target on its own stores; ``layers`` of it draft, in this step at least."""

    def __init__(self, executor: Executor, layers: int, *, reuse: bool = True) -> None:
        self.layers = layers
        self._executor = executor
        self._reuse = reuse
        self._live: dict[int, Sequence] = {}
        self._fed: dict[int, _Fed] = {}
        self._last: tuple[Prepared, list[_Fed]] | None = None

    def begin(self, seq: Sequence) -> None:
        """A sequence is drafted for from now on."""
        self._live[seq.id] = seq

    def forget(self, seq_id: int) -> None:
        """It ended, or starts over."""
        self._live.pop(seq_id, None)
        self._fed.pop(seq_id, None)

    def complete(self, seq: Sequence, computed: int) -> None:
        """Every committed token went through these layers: a page that fills lacks nothing."""

    def commit(self, seq: Sequence) -> None:
        """What was fed is void: accepted rows are the target's now, others are written over."""
        self._fed.pop(seq.id, None)
        self._last = None

    def feed(self, rows: Seq[tuple[int, Seq[int]]]) -> Tensor:
        """Logits [n, V] of the exit layer behind the given tokens of each sequence, which follow what it was
        fed before in this step; its newest committed token goes first. The pages must be writable."""
        spans, feds = [], []
        for i, tokens in rows:
            seq, fed = self._live[i], self._fed.get(i)
            if fed is None or (fed.start, fed.layers) != (seq.computed, self.layers):
                fed = self._fed[i] = _Fed(seq.computed, self.layers)
                tokens = [*seq.tokens[seq.computed :], *tokens]
            spans.append(_span(seq, len(fed.tokens), tuple(tokens)))
            feds.append(fed)
        step, streams, logits = self._run(spans)
        for fed, span, stream in zip(feds, spans, streams, strict=True):
            fed.tokens.extend(span.tokens)
            fed.streams.append(stream)
        self._last = step, feds
        return logits

    def deeper(self, layers: int) -> Tensor:
        """Logits [n, V] of the rows that were fed last behind more layers; what follows is fed to as many.

        Only what was fed at once can be taken deeper. Raises :class:`InvariantError` for anything else.
        """
        if self._last is None or any(len(fed.streams) != 1 for fed in self._last[1]) or layers <= self.layers:
            raise InvariantError(f"What was fed to {self.layers} layers cannot be taken to {layers}.")
        step, feds = self._last
        states = torch.cat([fed.streams[0] for fed in feds])
        out = self._executor.forward(step, (layers,), states=states, layers=range(self.layers, layers))
        self.layers = layers
        streams = torch.split(out.captured[layers], [len(fed.tokens) for fed in feds])
        for fed, stream in zip(feds, streams, strict=True):
            fed.layers, fed.streams = layers, [stream]
        return out.logits

    def enter(self, plan: StepPlan) -> Entry:
        """Run these layers on the rows of a step that were not drafted: it goes on behind them.

        The whole model where nothing was drafted.
        """
        known = [self._known(span) for span in plan.spans]
        if not any(known):
            return Entry()
        rest = [_behind(span, n) for span, n in zip(plan.spans, known, strict=True) if n < span.n_new]
        fresh = iter(self._run(rest)[1] if rest else ())
        states: list[Tensor] = []
        for span, n in zip(plan.spans, known, strict=True):
            if n:
                states.append(torch.cat(self._fed[span.seq].streams)[:n])
            if n < span.n_new:
                states.append(next(fresh))
        return Entry(torch.cat(states), range(self.layers, self._executor.decoder.config.num_layers))

    def nbytes(self) -> int:
        """Bytes of the streams that are kept."""
        return sum(x.untyped_storage().nbytes() for fed in self._fed.values() for x in fed.streams)

    def _known(self, span: SpanPlan) -> int:
        """Leading rows of a span whose streams are kept."""
        fed = self._fed.get(span.seq)
        if not self._reuse or fed is None or span.parents is not None:
            return 0
        if (fed.start, fed.layers) != (span.start, self.layers):
            return 0
        pairs = zip(fed.tokens, span.tokens, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(fed.tokens), span.n_new))

    def _run(self, spans: Seq[SpanPlan]) -> tuple[Prepared, list[Tensor], Tensor]:
        """What was run, streams [n, H] of each span behind the exit layer, and the logits asked for."""
        step = self._executor.prepare(StepPlan(0, tuple(spans)))
        out = self._executor.forward(step, (self.layers,), layers=range(self.layers))
        return step, list(torch.split(out.captured[self.layers], [s.n_new for s in spans])), out.logits


def _span(seq: Sequence, fed: int, tokens: tuple[int, ...]) -> SpanPlan:
    """Tokens behind the committed ones and ``fed`` others, seen as the target will see them."""
    start = seq.computed + fed
    first = start - seq.shift
    return SpanPlan(
        seq.id,
        tokens,
        tuple(range(first, first + len(tokens))),
        start,
        tuple(tuple(t) for t in seq.tables),
        1,
        slots=tuple(seq.used(g) + fed for g in range(len(seq.tables))) if seq.dropped else None,
        decodes=start >= seq.prompt_len,
    )


def _behind(span: SpanPlan, n: int) -> SpanPlan:
    """A span without its first ``n`` rows, which are written already; it needs no logits."""
    return replace(
        span,
        tokens=span.tokens[n:],
        positions=span.positions[n:],
        start=span.start + n,
        slots=tuple(used + n for used in span.slots) if span.slots is not None else None,
        logits=0,
    )
