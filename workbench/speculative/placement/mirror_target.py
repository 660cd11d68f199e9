"""Mirror's target: it waits for a window, and says early what it is about to decide.

Mirror Speculative Decoding (arXiv 2510.13161). Behind the first layers a proxy (an adapter where one was
trained, the last norm and the head) ranks what may follow at each place of the window; the likeliest go to
the drafter before the other layers run. Verification never sees the proxy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.models.decoder import Decoder
from workbench.speculative.placement.early_exit import ExitAdapter, Leave, adapted
from workbench.speculative.placement.messages import Candidates, TailStream
from workbench.speculative.placement.mirror_worker import Windows
from workbench.speculative.placement.placed import Place, PlacedDrafter
from workbench.speculative.placement.remote import Told
from workbench.speculative.placement.tails import TailBook


class MirrorTarget(PlacedDrafter):
    """``peek_layers`` run before candidates are sent; ``adapter`` stands before the last norm then.

    ``windows`` and ``reused`` count windows by how they came; ``foreseen``: verdicts by accepted length.
    """

    def __init__(
        self,
        name: str,
        place: Place,
        windows: Windows,
        *,
        peek_layers: int,
        patience: float,
        adapter: ExitAdapter | None = None,
    ) -> None:
        super().__init__(name, place, budget=windows.gamma, patience=patience)
        self.peek_layers = peek_layers
        self._adapter = adapter
        self.windows = 0
        self.reused = 0
        self.tries: Counter[int] = Counter()
        self.hits: Counter[int] = Counter()
        self._kappa = windows.kappa
        self._target: Decoder | None = None
        self._leave: Leave = lambda stream: stream
        self._answered: dict[int, bool] = {}  # streams that were told their window, and whether it was reused
        self._open: dict[int, int] = {}  # sequences whose window is judged now, with its length
        self._last: dict[int, int] = {}  # by stream: tokens of the verdict that the next window follows

    @property
    def reuse_rate(self) -> float | None:
        """Share of verdicts whose window was there; None before the second window."""
        tries = sum(self.tries.values())
        return sum(self.hits.values()) / tries if tries else None

    def attach_target(self, target: Decoder) -> None:
        """The target, whose last norm and head make the proxy."""
        super().attach_target(target)
        self._target, self._leave = target, adapted(target.final_norm, self._adapter, target)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """The windows."""
        trees = super().propose(contexts)
        self._open = {
            c.seq: len(t.tokens) for c, t in zip(contexts, trees, strict=True) if t is not None and t.tokens
        }
        return trees

    def watches(self, seq: int) -> bool:
        """Sequences whose window is judged in this step."""
        return seq in self._open

    def peek(self, rows: Sequence[tuple[int, Tensor]]) -> None:
        """Streams [n, H] behind the first layers: the ``kappa`` likeliest ids of each row are sent."""
        if self._target is None or not self._link.alive:
            return
        stream = torch.cat([states for _, states in rows])
        logits = self._target.logits(self._leave(stream)).log_softmax(-1)
        # One more: the window's own next token is no candidate.
        chances, ids = logits.topk(min(self._kappa + 1, logits.shape[-1]))
        pairs = [tuple(zip(i, c, strict=True)) for i, c in zip(ids.tolist(), chances.tolist(), strict=True)]
        at = 0
        for seq, states in rows:
            book = self.books[seq]
            places = tuple(pairs[at : at + len(states)][-self._open[seq] - 1 :])
            self._link.send(Candidates(book.stream, len(book.tokens), places))
            at += len(states)

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """Re-root, and tell the drafter; its window is owed again."""
        stream = self.books[seq].stream
        self._answered.pop(stream, None)
        self._last.pop(stream, None)
        if self._open.pop(seq, None) is not None:
            self._last[stream] = len(tokens)
        self._drafted.discard(seq)  # whether its outcome was foreseen is told with the next window
        super().commit(seq, tokens)

    def forget(self, seq: int) -> None:
        """Its stream ends."""
        stream = self.books[seq].stream
        self._answered.pop(stream, None)
        self._last.pop(stream, None)
        self._open.pop(seq, None)
        super().forget(seq)

    def _lacks(self, books: Sequence[TailBook]) -> bool:
        return any(b.stream not in self._answered for b in books)

    def _take(self, book: TailBook, tail: TailStream) -> None:
        super()._take(book, tail)
        if tail.base_len != len(book.tokens) or book.stream in self._answered:
            return
        self._answered[book.stream] = tail.reused
        self.windows += 1
        self.reused += tail.reused
        gained = self._last.pop(book.stream, None)
        if gained is not None:
            self._outcomes.append(Told(tail.reused))
            self.tries[gained - 1] += 1
            self.hits[gained - 1] += tail.reused
