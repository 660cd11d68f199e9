"""Continuous batching: which sequences run in this step, and how many of their tokens.

The rules, in order:
1. Running decodes first, one token each, so that a decode gets a token in every step whatever arrives
   (Sarathi-Serve, arXiv 2403.02310, stall-free batching). Drafts share the rest of a token budget, half of
   it where prompts wait: how little of their room they will use is not known yet.
2. Then prompts in flight, then waiting ones while the token budget lasts; without a budget a prompt runs
   in one piece. Waiting ones come first come first served and are never overtaken, unless the prefix index
   asks for its longest match first (SGLang); then a request is overtaken ``PATIENCE`` times at most, and
   one that was preempted never.
3. A sequence is admitted only when pages for all its known tokens are free (behind a window: for what is
   seen at a time), so a prefill never starves half-way. Decodes that run out of pages preempt the youngest
   sequence, which is recomputed later; the oldest is never preempted, so every sequence finishes.
Blocks are cut where what a position sees changes: at pages that are coded whole, at selections (law 3).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workbench.engine.draft_seams import DraftTree
from workbench.engine.kv import KVCache
from workbench.engine.sequence import Sequence

Boundary = Callable[[Sequence], int]
"""How many tokens a sequence may be given until the next place where its blocks are cut, at least one."""

PATIENCE = 16
"""How often a waiting request may be overtaken by later ones with more of their prompt cached."""
WINDOW = 64
"""Waiting requests that are compared; those behind them do not overtake."""


@dataclass
class Batch:
    """Sequences of a step with their token counts; ``room``: draft tokens each decode may add."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    room: list[int] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Owns the waiting queue and the running list (both in order of arrival)."""

    def __init__(
        self,
        kv: KVCache,
        *,
        max_sequences: int,
        max_batch_tokens: int = 0,
        boundaries: Seq[Boundary] = (),
    ) -> None:
        self.kv = kv
        self.max_sequences = max_sequences
        self.budget = max_batch_tokens
        self.boundaries = tuple(boundaries)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind all others."""
        self.waiting.append(seq)

    def select(self, draft_room: int) -> Batch:
        """Choose the step's sequences; :meth:`secure` finds pages for them, once drafts are known."""
        out = Batch()
        left = self.budget or 1 << 60
        decodes = [s for s in self.running if s.pending == 1]
        out.decodes = decodes[:left]
        left -= len(out.decodes)
        waits = bool(self.waiting) or any(s.pending > 1 for s in self.running)
        spare = left // 2 if waits else left
        for i, seq in enumerate(out.decodes):
            share = spare // (len(out.decodes) - i)
            room = min(draft_room, share, seq.left - 1, self.until_boundary(seq) - 1)
            out.room.append(max(room, 0) if seq.n_generated else 0)
            spare -= out.room[-1]
            left -= out.room[-1]
        for seq in [s for s in self.running if s.pending > 1]:
            left -= self._prefill(seq, left, out)
        while self.waiting and left > 0:
            seq = self._next()
            if self._places + 1 + len(seq.siblings) > self.max_sequences:
                break
            if not self.kv.admit(seq, len(seq.tokens), block=self.budget or None):
                break
            place = self.waiting.index(seq)
            for passed in itertools.islice(self.waiting, place):
                passed.overtaken += 1
            del self.waiting[place]
            seq.state = "running"
            self.running.append(seq)
            self.running.sort(key=_arrival)
            left -= self._prefill(seq, left, out)
        return out

    def secure(self, batch: Batch, drafts: dict[int, DraftTree]) -> None:
        """Make the slots of every selected sequence writable.

        A sequence that finds no pages first gives up its draft; then the youngest is preempted.
        """
        wanted = [(s, 1) for s in batch.decodes] + batch.prefills
        for seq, n in sorted(wanted, key=lambda item: item[0].id):
            while seq.state == "running":
                draft = drafts.get(seq.id)
                if self.kv.extend(seq, seq.computed + n + (len(draft.tokens) if draft else 0)):
                    break
                if draft is not None:
                    del drafts[seq.id]
                else:
                    self.preempt(self.running[-1], batch)
                    drafts.pop(batch.preempted[-1].id, None)

    def preempt(self, seq: Sequence, batch: Batch) -> None:
        """Free a sequence's pages and put it at the head of the queue; its tokens are kept and recomputed."""
        self.running.remove(seq)
        self.kv.release(seq)
        seq.state = "waiting"
        seq.preemptions += 1
        self.waiting.appendleft(seq)
        batch.preempted.append(seq)
        if seq in batch.decodes:
            i = batch.decodes.index(seq)
            del batch.decodes[i], batch.room[i]
        batch.prefills = [(s, n) for s, n in batch.prefills if s is not seq]

    def remove(self, seq: Sequence) -> None:
        """Take a finished or aborted sequence out, wherever it is; its pages come back."""
        if seq.state == "running":
            self.running.remove(seq)
            self.kv.release(seq)
        elif seq.state == "waiting" and seq in self.waiting:
            self.waiting.remove(seq)
        seq.state = "finished"

    def _next(self) -> Sequence:
        """The waiting request whose turn it is."""
        first = self.waiting[0]
        index = self.kv.index
        if index is None or not index.longest_first or len(self.waiting) == 1:
            return first
        if first.preemptions or first.overtaken >= PATIENCE:
            return first

        def cached(seq: Sequence) -> int:
            match = self.kv.match(seq)
            return len(match.full) * self.kv.page_size + match.rows

        return max(itertools.islice(self.waiting, WINDOW), key=cached)  # the earliest of equals

    @property
    def _places(self) -> int:
        """Sequences that run, and those that will once the prompt they share is computed."""
        return sum(1 + len(s.siblings) for s in self.running)

    def _prefill(self, seq: Sequence, left: int, out: Batch) -> int:
        n = min(seq.pending, left, self.until_boundary(seq))
        if n <= 0:
            return 0
        if seq.pending == 1:  # a resumed decode, or a prompt of which all but one token was cached
            out.decodes.append(seq)
            out.room.append(0)
        else:
            out.prefills.append((seq, n))
        return n

    def until_boundary(self, seq: Sequence) -> int:
        """Tokens that a block of the sequence may have now."""
        return min((b(seq) for b in self.boundaries), default=1 << 60)


def _arrival(seq: Sequence) -> int:
    return seq.id
