"""The target's pass in two parts, for a drafter that wants to know early what the target is about to say.

Mirror Speculative Decoding (arXiv 2510.13161): what leaves an inner layer is shown to the drafter before the
layers behind it run, so that it can work meanwhile. The layers do the same work in the same order as in one
pass; nothing that the drafter does with what it saw comes back into it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from workbench.engine.draft_seams import Drafter
from workbench.engine.executor import Executor
from workbench.engine.exit_runner import Entry
from workbench.engine.seams import StepPlan
from workbench.engine.sequence import Sequence


@runtime_checkable
class PeekingDrafter(Drafter, Protocol):
    """A drafter that is shown the stream behind ``peek_layers`` layers while the pass that judges it runs."""

    peek_layers: int

    def watches(self, seq: int) -> bool:
        """Whether it wants to be shown anything of a sequence in this step."""
        ...

    def peek(self, rows: Seq[tuple[int, Tensor]]) -> None:
        """Streams [n, H] behind those layers, by sequence it watches: of rows that logits are asked for."""
        ...


class SplitRunner:
    """``executor`` holds the target on its own stores."""

    def __init__(self, executor: Executor, drafter: PeekingDrafter) -> None:
        self._executor = executor
        self._drafter = drafter
        self._layers = drafter.peek_layers

    def begin(self, seq: Sequence) -> None:
        """It has no KV of its own: nothing begins."""

    def forget(self, seq_id: int) -> None:
        """Nothing ends."""

    def complete(self, seq: Sequence, computed: int) -> None:
        """A page that fills lacks nothing."""

    def commit(self, seq: Sequence) -> None:
        """Nothing is kept from step to step."""

    def enter(self, plan: StepPlan) -> Entry:
        """Run the first layers on all rows, show what leaves them; the pass goes on behind them.

        The whole model where nobody watches.
        """
        if not any(self._drafter.watches(span.seq) for span in plan.spans):
            return Entry()
        silent = replace(plan, spans=tuple(replace(span, logits=0) for span in plan.spans))
        out = self._executor.forward(
            self._executor.prepare(silent), (self._layers,), layers=range(self._layers)
        )
        stream = out.captured[self._layers]
        shown, end = [], 0
        for span in plan.spans:
            end += span.n_new
            if span.logits and self._drafter.watches(span.seq):
                shown.append((span.seq, stream[end - span.logits : end]))
        self._drafter.peek(shown)
        return Entry(stream, range(self._layers, self._executor.decoder.config.num_layers))
