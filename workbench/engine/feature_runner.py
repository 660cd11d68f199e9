"""Runs a head that reads hidden states over the pages of the sequences it drafts for.

What it is fed of committed tokens uses the target's own states and stays; what it is fed of a draft uses its
own outputs as states and is void with the next step, accepted or not: those rows are fed again with the
target's states. The state before a prefix that an index gave comes with its last page; one that was never
shown (behind pages that a lossy codec gave back) counts as zeros.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from workbench.engine.draft_runner import DraftRunner
from workbench.engine.executor import Executor
from workbench.engine.seams import SpanPlan, StepPlan
from workbench.engine.sequence import Sequence
from workbench.models.chain_program import ChainBatch, ChainProgram
from workbench.models.decoder import Decoder
from workbench.spec.errors import InvariantError


@dataclass(frozen=True)
class Branch:
    """Drafted tokens behind a sequence's newest one, and the state [H] of each one's parent.

    ``parents[i]`` is another of these tokens, or -1: the newest committed one. None: a chain, whose first
    ``written`` tokens were fed before and are not given again. The last ``asked`` rows are answered.
    """

    seq: int
    tokens: tuple[int, ...]
    states: tuple[Tensor, ...]
    parents: tuple[int, ...] | None = None
    written: int = 0
    asked: int = 1


@dataclass(frozen=True)
class Fed:
    """A sequence's answers: ``logits`` [R, W] (W: the head's own vocabulary), and the ``states`` [R, H] that
    leave the last layer, which a next row reads."""

    logits: Tensor
    states: Tensor


@dataclass
class _Shown:
    """States [n, H] of the positions ``start … start + n - 1``."""

    start: int
    states: Tensor


class FeatureRunner(DraftRunner):
    """``executor`` holds a :class:`~workbench.models.feature_decoder.FeatureDecoder`."""

    def __init__(self, executor: Executor, group: int, page_size: int) -> None:
        super().__init__(executor, group, page_size)
        weights = executor.decoder.weights
        self._zero = torch.zeros(
            executor.decoder.config.hidden_size, dtype=weights.residual_dtype, device=weights.device
        )
        self._shown: dict[int, _Shown] = {}

    @property
    def rereads(self) -> int | None:
        """See :class:`~workbench.engine.page_ends.PageEnds`: the row behind reads the state of one token."""
        return 1

    @property
    def end(self) -> Tensor | None:
        """A state [H]."""
        return self._zero

    def begin(self, seq: Sequence) -> None:
        """A sequence is drafted for from now on; a prefix that it was given brings what is read behind."""
        super().begin(seq)
        pages, within = divmod(seq.computed, self._page_size)
        if not within and pages - 1 in seq.ends:
            self._resume(seq.id, seq.computed - 1, seq.ends[pages - 1])

    def complete(self, seq: Sequence, computed: int) -> None:
        """The tokens up to ``computed`` are about to fill pages: what is read behind these goes with them."""
        super().complete(seq, computed)
        for page in range(seq.computed // self._page_size, computed // self._page_size):
            state = self._behind(seq.id, (page + 1) * self._page_size - 1)
            if state is not None:
                seq.ends[page] = state

    @property
    def decoder(self) -> Decoder:
        """The head."""
        return self._executor.decoder

    @property
    def in_kernels(self) -> bool:
        """Whether drafts may be one call of the compiled kernels."""
        return self._executor.in_kernels

    @cached_property
    def _planes(self) -> tuple[Tensor, Tensor]:
        return self._executor.planes(0)

    def show(self, seq_id: int, start: int, states: Tensor) -> None:
        """States [n, H] of committed tokens, in order of positions; a gap makes earlier ones void."""
        known = self._shown.get(seq_id)
        if known is None or known.start + len(known.states) != start:
            self._shown[seq_id] = _Shown(start, states)
            return
        first = min(max(self._fed.get(seq_id, 0) - 1, known.start), start)  # older ones were fed
        if first == start:
            self._shown[seq_id] = _Shown(start, states)
            return
        self._shown[seq_id] = _Shown(first, torch.cat((known.states[first - known.start :], states)))

    def forget(self, seq_id: int) -> None:
        """It ended, or starts over."""
        super().forget(seq_id)
        self._shown.pop(seq_id, None)

    def fork(self, seq_id: int, child: int) -> None:
        """What was shown of a sequence holds for ``child``, which shares its pages."""
        if seq_id in self._shown:
            self._shown[child] = self._shown[seq_id]

    def nbytes(self) -> int:
        """Bytes of the states that are kept, each once."""
        held = (s.states.untyped_storage() for s in self._shown.values())
        return sum({s.data_ptr(): s.nbytes() for s in held}.values())

    def catch_up(self, ids: Seq[int]) -> list[Fed]:
        """Feed what was committed since; the row of the newest token is answered, and counts as fed."""
        return self._forward(*self._missed(ids, logits=1))

    def levels(self, ids: Seq[int]) -> list[Tensor]:
        """Feed what was committed since; of the newest token's row the streams [N, H] behind every layer."""
        spans, states = self._missed(ids, logits=0)
        step = self._executor.prepare(StepPlan(0, tuple(spans)))
        layers = tuple(range(1, self._executor.decoder.config.num_layers + 1))
        out = self._executor.forward(step, layers, states=torch.cat(states))
        rows, end = [], -1
        for span in spans:
            end += span.n_new
            rows.append(torch.stack([out.captured[layer][end] for layer in layers]))
        return rows

    def _missing_rows(self, seq: Sequence) -> tuple[int, int]:
        """Committed tokens that were not fed, at least the newest: its logits are wanted."""
        return min(self._fed[seq.id], len(seq.tokens) - 1), len(seq.tokens)

    def states(self, seq_id: int, first: int, end: int) -> Tensor:
        """What the rows ``first … end - 1`` are given."""
        return self._states(seq_id, first, end)

    def fed_elsewhere(self, seq_id: int, newest: int, states: Tensor | None) -> None:
        """See :meth:`DraftRunner.fed_elsewhere`."""
        super().fed_elsewhere(seq_id, newest, states)
        if states is not None:
            self.show(seq_id, newest, states)

    def _behind(self, seq_id: int, row: int) -> Tensor | None:
        """What a sequence needs of committed row ``row`` to go on behind it, if it is known; a copy."""
        known = self._shown.get(seq_id)
        if known is None or not known.start <= row < known.start + len(known.states):
            return None
        return known.states[row - known.start].clone()

    def _resume(self, seq_id: int, row: int, behind: Tensor) -> None:
        """The inverse."""
        self._shown[seq_id] = _Shown(row, behind[None])

    def _missed(self, ids: Seq[int], logits: int) -> tuple[list[SpanPlan], list[Tensor]]:
        """Rows of what was committed since, at least the newest, with their states; they count as fed."""
        spans, states = [], []
        for i in ids:
            seq = self._live[i]
            first, end = self._missing_rows(seq)
            spans.append(self._span(seq, seq.tokens[first:end], first, logits=logits))
            states.append(self._states(i, first, end))
            self._fed[i] = end
        return spans, states

    def chains(
        self, program: ChainProgram, asks: Seq[tuple[int, int]], confidence: float
    ) -> list[list[int]] | None:
        """Greedy drafts of the (sequence, room) asked for, in one call that feeds what is new before them.

        None, and nothing done, where a sequence has more of that than a call takes. ``confidence``: see
        :class:`~workbench.models.chain_program.ChainBatch`.
        """
        spans, tables, tokens = array("i"), array("i"), array("q")
        states = []
        for i, room in asks:
            seq = self._live[i]
            table, (first, end) = seq.tables[self._group], self._missing_rows(seq)
            if end - first > program.LONGEST:
                return None
            if len(table) * self._page_size < end + room - 1:
                raise InvariantError(f"Drafts of {room} tokens behind {end} find {len(table)} pages.")
            spans.extend((end - first, first, room, len(tables)))
            tables.extend(table)
            tokens.extend(seq.tokens[first:end])
            states.append(self._states(i, first, end))
        k, v = self._planes
        batch = ChainBatch(
            spans, tables, tokens, states[0] if len(states) == 1 else torch.cat(states), confidence
        )
        for i, _ in asks:
            self._fed[i] = len(self._live[i].tokens)
        # Positions of the slots are not noted: verification notes the same ones when it writes its own rows.
        return program(batch, k, v)

    def draft(self, branches: Seq[Branch]) -> list[Fed]:
        """Feed drafted tokens."""
        spans, states = [], []
        for b in branches:
            seq = self._live[b.seq]
            start = len(seq.tokens) + b.written
            spans.append(self._span(seq, b.tokens, start, parents=b.parents, logits=b.asked))
            states.append(torch.stack(b.states))
        return self._forward(spans, states)

    def _span(
        self,
        seq: Sequence,
        tokens: Seq[int],
        start: int,
        *,
        parents: tuple[int, ...] | None = None,
        logits: int,
    ) -> SpanPlan:
        n = len(tokens)
        if parents is None:
            positions = tuple(range(start, start + n))
        else:
            depths: list[int] = []
            for p in parents:
                depths.append(0 if p < 0 else depths[p] + 1)
            positions = tuple(start + d for d in depths)
        table = (tuple(seq.tables[self._group]),)
        return SpanPlan(seq.id, tuple(tokens), positions, start, table, logits, parents)

    def _states(self, seq_id: int, first: int, end: int) -> Tensor:
        """Inputs [end - first, H] of rows ``first … end - 1``: the states of the positions before them."""
        known = self._shown.get(seq_id)
        if known is not None and known.start < first and end - 1 <= known.start + len(known.states):
            return known.states[first - 1 - known.start : end - 1 - known.start]
        out = self._zero.repeat(end - first, 1)
        if known is not None:
            low, high = max(first - 1, known.start), min(end - 1, known.start + len(known.states))
            if low < high:
                out[low + 1 - first : high + 1 - first] = known.states[low - known.start : high - known.start]
        return out

    def _run(self, rows: Seq[tuple[Sequence, Seq[int]]], logits: int = 1) -> Tensor:
        """Committed tokens behind those that were fed."""
        spans, states = [], []
        for seq, tokens in rows:
            first = self._fed[seq.id]
            end = self._fed[seq.id] = first + len(tokens)
            spans.append(self._span(seq, tokens, first, logits=logits))
            states.append(self._states(seq.id, first, end))
        step = self._executor.prepare(StepPlan(0, tuple(spans)))
        return self._executor.forward(step, states=torch.cat(states)).logits

    def _forward(self, spans: list[SpanPlan], states: list[Tensor]) -> list[Fed]:
        step = self._executor.prepare(StepPlan(0, tuple(spans)))
        out = self._executor.forward(step, states=states[0] if len(states) == 1 else torch.cat(states))
        sizes = [span.logits for span in spans]
        answers = zip(torch.split(out.logits, sizes), torch.split(out.streams, sizes), strict=True)
        return [Fed(*both) for both in answers]
