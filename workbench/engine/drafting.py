"""The drafter's side of a step: who is drafted for, within which room, and what it is told afterwards.

A sequence's drafter state begins at its first draft and is forgotten when the sequence ends or is
preempted, so that it always equals the committed ids.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workbench.engine.scheduler import Batch
from workbench.engine.seams import DraftContext, Drafter, DraftTree
from workbench.engine.sequence import Sequence
from workbench.spec.errors import InvariantError
from workbench.spec.events import TokenInfo


class Drafting:
    """A drafter, or none, and the sequences it knows."""

    def __init__(self, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self._known: set[int] = set()

    @property
    def max_draft(self) -> int:
        """Most tokens ever drafted per sequence and step."""
        return self.drafter.max_draft if self.drafter is not None else 0

    def propose(self, batch: Batch) -> dict[int, DraftTree]:
        """Drafts by sequence id. Raises :class:`InvariantError` when one is larger than its room."""
        if self.drafter is None:
            return {}
        contexts = []
        for seq, room in zip(batch.decodes, batch.room, strict=True):
            if room <= 0 or seq.siblings:
                continue
            if seq.id not in self._known:
                self.drafter.begin(seq.id, seq.tokens)
                self._known.add(seq.id)
            contexts.append(DraftContext(seq.id, seq.tokens, room, seq.params.greedy))
        trees = self.drafter.propose(contexts) if contexts else []
        out = {c.seq: t for c, t in zip(contexts, trees, strict=True) if t is not None and t.tokens}
        for c in contexts:  # a longer draft would cross the budget, the page pool or a codec's boundary
            if c.seq in out and len(out[c.seq].tokens) > c.room:
                n = len(out[c.seq].tokens)
                raise InvariantError(f"{self.drafter.name} drafted {n} tokens where {c.room} were asked for.")
        return out

    def commit(self, seq: Sequence, infos: Seq[TokenInfo]) -> None:
        """Tell the drafter which tokens the sequence gained."""
        if self.drafter is not None and infos and seq.id in self._known:
            self.drafter.commit(seq.id, [i.id for i in infos])

    def forget(self, seq: Sequence) -> None:
        """The sequence ended, or starts over."""
        if self.drafter is not None and seq.id in self._known:
            self.drafter.forget(seq.id)
            self._known.discard(seq.id)

    def nbytes(self) -> int:
        """Bytes of draft state."""
        return self.drafter.nbytes() if self.drafter is not None else 0
