"""Draft control: how many tokens may be drafted for each sequence in this step, none included.

A control only shrinks the room that scheduler and drafter leave, before anything is drafted: dropping sampled
tokens after they were seen would bias the output. It learns from what the engine measures anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.engine.scheduler import Batch
from workbench.spec.events import StepEvent


class DraftControl(Protocol):
    """Decides lengths of drafts; a wrong decision costs time, never correctness."""

    name: str

    def rooms(self, asks: Sequence[tuple[int, int]], rows: int, sequences: int) -> list[int]:
        """Tokens to draft at most, for each (sequence, room): from 0 to its room.

        ``rows`` the step has without drafts; ``sequences`` gain a token in it anyway.
        """
        ...

    def judged(self, seq: int, tree: DraftTree, path: Sequence[int]) -> None:
        """Of a sequence's draft the nodes of ``path`` were accepted."""
        ...

    def observe(self, event: StepEvent) -> None:
        """What the step cost."""
        ...

    def forget(self, seq: int) -> None:
        """The sequence ended."""
        ...

    def nbytes(self) -> int:
        """Bytes of what it has learnt."""
        ...


class Controlling:
    """A control, or none, between the scheduler's batch and the drafter."""

    def __init__(self, control: DraftControl | None) -> None:
        self.control = control

    def limit(self, batch: Batch) -> None:
        """Shrink the batch's rooms to what the control grants."""
        if self.control is None:
            return
        asked = [i for i, room in enumerate(batch.room) if room > 0 and not batch.decodes[i].siblings]
        if not asked:
            return
        rows = len(batch.decodes) + sum(n for _, n in batch.prefills)
        asks = [(batch.decodes[i].id, batch.room[i]) for i in asked]
        granted = self.control.rooms(asks, rows, len(batch.decodes))
        for i, room in zip(asked, granted, strict=True):
            batch.room[i] = min(batch.room[i], room)

    def learn(
        self, event: StepEvent, drafts: Mapping[int, DraftTree], verdicts: Mapping[int, Verdict]
    ) -> None:
        """Tell the control what came of its decision."""
        if self.control is None:
            return
        for seq, verdict in verdicts.items():
            if seq in drafts:
                self.control.judged(seq, drafts[seq], verdict.path)
        self.control.observe(event)

    def forget(self, seq: int) -> None:
        """The sequence ended."""
        if self.control is not None:
            self.control.forget(seq)

    def nbytes(self) -> int:
        """Bytes of what the control has learnt."""
        return self.control.nbytes() if self.control is not None else 0
