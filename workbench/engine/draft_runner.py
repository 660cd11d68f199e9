"""A drafter's own layers, run over the pages of the sequences it drafts for.

Their K and V are further layers of a KV group that sees all keys: they share its page tables, so prefix hits,
copies, preemption and memory counts hold for them as for the target's. What was fed of a draft that was not
accepted is written over. A page is complete in every layer before it is coded or found by others.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from workbench.engine.executor import Executor
from workbench.engine.seams import SpanPlan, StepPlan
from workbench.engine.sequence import Sequence


class DraftRunner:
    """``executor`` holds the drafter's decoder on the store of KV group ``group``."""

    def __init__(self, executor: Executor, group: int, page_size: int) -> None:
        self._executor = executor
        self._group = group
        self._page_size = page_size
        self._live: dict[int, Sequence] = {}
        self._fed: dict[int, int] = {}  # tokens whose K and V are written, those of a draft included

    def begin(self, seq: Sequence) -> None:
        """A sequence is drafted for from now on."""
        self._live[seq.id] = seq
        self._fed[seq.id] = seq.drafted

    def forget(self, seq_id: int) -> None:
        """It ended, or starts over."""
        self._live.pop(seq_id, None)
        self._fed.pop(seq_id, None)

    def feed(self, rows: Seq[tuple[int, Seq[int]]]) -> Tensor:
        """Logits [n, V] behind the given tokens of each sequence, which follow what it was fed before.

        What of the committed tokens was not fed yet goes first. The pages must have been made writable.
        """
        return self._run([(self._live[i], [*self._missing(self._live[i]), *tokens]) for i, tokens in rows])

    @property
    def rereads(self) -> int | None:
        """See :class:`~workbench.engine.page_ends.PageEnds`: it reads tokens only."""
        return 0

    @property
    def end(self) -> Tensor | None:
        """A tensor such as those that are kept with pages; None: none are."""
        return None

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._executor.device

    @property
    def executor(self) -> Executor:
        """The layers and their K and V."""
        return self._executor

    def behind(self, ids: Seq[int], most: int) -> list[int]:
        """The first token of each sequence that was not fed yet; of more than ``most`` all but the newest are
        fed now. The newest counts as not fed."""
        late = []
        for i in ids:
            seq = self._live[i]
            newest = len(seq.tokens) - 1
            self._fed[i] = min(self._fed[i], newest)
            if newest + 1 - self._fed[i] > most:
                late.append((seq, seq.tokens[self._fed[i] : newest]))
        if late:
            self._run(late, logits=0)
        return [self._fed[i] for i in ids]

    def fed_elsewhere(self, seq_id: int, newest: int, states: Tensor | None) -> None:
        """Rows up to the one of token ``newest`` were fed by others.

        ``states`` [n, H]: those of the tokens from it on, where layers read some.
        """
        self._fed[seq_id] = newest + 1

    def complete(self, seq: Sequence, computed: int) -> None:
        """The tokens up to ``computed`` are about to fill a page: write what is missing of them."""
        fed = self._fed.get(seq.id, seq.drafted)
        if computed // self._page_size > seq.computed // self._page_size and fed < computed:
            self._live.setdefault(seq.id, seq)
            self._fed[seq.id] = fed
            self._run([(seq, seq.tokens[fed:computed])], logits=0)

    def commit(self, seq: Sequence) -> None:
        """What was fed behind the committed tokens is void."""
        if seq.id in self._fed:
            self._fed[seq.id] = seq.drafted = min(self._fed[seq.id], seq.computed)

    def _missing(self, seq: Sequence) -> list[int]:
        """Committed tokens that were not fed yet, the newest included."""
        return seq.tokens[self._fed[seq.id] :]

    def _run(self, rows: Seq[tuple[Sequence, Seq[int]]], logits: int = 1) -> Tensor:
        spans = []
        for seq, tokens in rows:
            start = self._fed[seq.id]
            end = self._fed[seq.id] = start + len(tokens)
            table = (tuple(seq.tables[self._group]),)
            spans.append(SpanPlan(seq.id, tuple(tokens), tuple(range(start, end)), start, table, logits))
        return self._executor.forward(self._executor.prepare(StepPlan(0, tuple(spans)))).logits
