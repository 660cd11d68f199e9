"""Runs a chain of modules that read one another's states over the pages of the sequences it drafts for.

Beside the target's states, shown as to any head, a row needs what the modules came out with at the row
before: in the same pass, or kept from the newest committed row that was fed. Behind the newest token the
first module goes on with what the last one left, and step j of a draft is answered by module j mod D.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from workbench.engine.executor import Executor
from workbench.engine.feature_runner import Branch, FeatureRunner, Fed
from workbench.engine.seams import SpanPlan, StepPlan
from workbench.engine.sequence import Sequence


class ChainRunner(FeatureRunner):
    """``executor`` holds a :class:`~workbench.models.mtp_chain.ChainDecoder`."""

    def __init__(self, executor: Executor, group: int, page_size: int) -> None:
        super().__init__(executor, group, page_size)
        self._modules = executor.decoder.config.num_layers
        self._size = executor.decoder.config.hidden_size
        self._kept: dict[int, tuple[int, Tensor]] = {}  # newest committed row fed, and its states [D * H]
        self._ends: dict[tuple[int, int], Tensor] = {}  # the same of the last rows of pages about to be full

    @property
    def rereads(self) -> int | None:
        """A chain of modules reads as many tokens back: within a page it cannot begin."""
        return 1 if self._modules == 1 else None

    def forget(self, seq_id: int) -> None:
        """It ended, or starts over."""
        super().forget(seq_id)
        self._kept.pop(seq_id, None)

    def fork(self, seq_id: int, child: int) -> None:
        """What was shown of a sequence, and what the modules came out with, holds for ``child``."""
        super().fork(seq_id, child)
        if seq_id in self._kept:
            self._kept[child] = self._kept[seq_id]

    def nbytes(self) -> int:
        """Bytes of the states that are kept."""
        return super().nbytes() + sum(s.untyped_storage().nbytes() for _, s in self._kept.values())

    @property
    def end(self) -> Tensor | None:
        """A state [H], and of several modules what each came out with."""
        return self._zero if self._modules == 1 else self._zero.repeat(1 + self._modules)

    def complete(self, seq: Sequence, computed: int) -> None:
        """See :meth:`FeatureRunner.complete`."""
        if seq.id in self._kept:  # the first of them may end a page, and rows behind it are fed now
            row, left = self._kept[seq.id]
            self._ends[seq.id, row] = left
        super().complete(seq, computed)
        self._ends.clear()

    def _behind(self, seq_id: int, row: int) -> Tensor | None:
        """State [H] of the row, and what the modules came out with [D * H]."""
        shown = super()._behind(seq_id, row)
        if self._modules == 1:
            return shown  # a single module reads the target's only
        left = self._ends.get((seq_id, row))
        return None if shown is None or left is None else torch.cat((shown, left))

    def _resume(self, seq_id: int, row: int, behind: Tensor) -> None:
        """The inverse."""
        super()._resume(seq_id, row, behind[: self._size])
        if self._modules > 1:
            self._kept[seq_id] = row, behind[self._size :]

    def catch_up(self, ids: Seq[int]) -> list[Fed]:
        """Feed what was committed since; the row of the newest token is answered, and kept."""
        out = super().catch_up(ids)
        for i, fed in zip(ids, out, strict=True):
            self._kept[i] = self._fed[i] - 1, fed.states[-1].clone()
        return out

    def draft(self, branches: Seq[Branch]) -> list[Fed]:
        """Feed the next token of chains."""
        return super().draft([replace(b, states=tuple(self._next(b, s) for s in b.states)) for b in branches])

    def _next(self, branch: Branch, left: Tensor) -> Tensor:
        """What the modules are given behind a row that left them with ``left`` [D * H]."""
        asked = left.new_tensor([(branch.written + 1) % self._modules + 1])
        return torch.cat((left[-self._size :], left[: -self._size], asked))

    def _states(self, seq_id: int, first: int, end: int) -> Tensor:
        """[end - first, D * H + 1]: the target's states, and of the first row those of the modules."""
        shown = super()._states(seq_id, first, end)
        out = shown.new_zeros(end - first, self._modules * self._size + 1)
        out[:, : self._size] = shown
        out[0, -1] = 1
        row, states = self._kept.get(seq_id, (-1, shown))
        if row >= 0 and row == first - 1:
            out[0, self._size : -1] = states[: -self._size]
        return out

    def _run(self, rows: Seq[tuple[Sequence, Seq[int]]], logits: int = 1) -> Tensor:
        """Committed tokens behind those that were fed; the newest row of each is kept."""
        spans: list[SpanPlan] = []
        states = []
        for seq, tokens in rows:
            first = self._fed[seq.id]
            end = self._fed[seq.id] = first + len(tokens)
            spans.append(self._span(seq, tokens, first, logits=logits))
            states.append(self._states(seq.id, first, end))
        step = self._executor.prepare(StepPlan(0, tuple(spans)))
        out = self._executor.forward(step, (self._modules,), states=torch.cat(states))
        first = 0
        for span in spans:
            left = out.captured[self._modules][first : first + span.n_new]
            first += span.n_new
            self._kept[span.seq] = span.start + span.n_new - 1, left[-1].clone()
            for row in range(-(span.start + 1) % self._page_size, span.n_new, self._page_size):
                self._ends[span.seq, span.start + row] = left[row]
        return out.logits
