"""The policy in the engine: asked behind each layer of a round's first draft, then behind each draft.

Sequences of a step run together and leave behind the same layer: what is worth most to all of them (the sum
of their Q). Each drafts as far as pays for itself. The state is what :mod:`state` says, of the model's raw
laws: temperature and filters are the request's, and change what is accepted, not what is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.spec.events import StepEvent
from workbench.speculative.lede.choice import Watch
from workbench.speculative.lede.learnt import Learnt, Way
from workbench.speculative.lede.rounds import static
from workbench.speculative.lede.state import GO_ON, Reading, State, moved, read

Policy = Literal["auto", "learnt", "fixed", "off"]


@dataclass
class _Live:
    """A sequence: how its recent drafts fared, and the round it is in."""

    recent: float
    layers: int = 0
    chain: float = 1.0


class _Kind:
    """One way of drafting, and whether it is trusted now."""

    def __init__(self, way: Way, policy: Policy, probe: int) -> None:
        self.way = way
        self.watch = Watch(way.guard)
        self._policy = policy
        self._probe = probe
        self._idle = 0

    @property
    def learnt(self) -> bool:
        """Whether the network decides now."""
        if self._policy == "auto":
            return self.way.learnt and not self.watch.safe
        return self._policy == "learnt"

    def drafts(self) -> bool:
        """Whether this round is looked at: not where drafts do not pay, but for a try now and then."""
        if self._policy == "off":
            return False
        if self.learnt or self.way.fixed[0]:
            return True
        self._idle += 1
        return self._policy == "auto" and self.way.learnt and self._idle % self._probe == 0


class LedeControl:
    """An :class:`~workbench.engine.exit_control.ExitControl` that does what was learnt offline."""

    name = "lede"

    def __init__(
        self, learnt: Learnt, *, longest: int = 12, policy: Policy = "auto", probe: int = 32
    ) -> None:
        self._kinds = {name: _Kind(way, policy, probe) for name, way in learnt.ways.items()}
        self._bytes = learnt.nbytes()
        self._live: dict[int, _Live] = {}
        self._of: dict[int, _Kind] = {}
        self._trying: set[int] = set()
        self.longest = min(longest, max(way.limits.longest for way in learnt.ways.values()))

    # -- the control seam --------------------------------------------------------------------------------

    def rooms(self, asks: Sequence[tuple[int, int]], rows: int, sequences: int) -> list[int]:
        """All that there is room for: it decides as drafts are made."""
        return [room for _, room in asks]

    def judged(self, seq: int, tree: DraftTree, path: Sequence[int]) -> None:
        """Remember how a round fared."""
        live, kind = self._live.get(seq), self._of.get(seq)
        if live is not None:
            live.recent = moved(live.recent, len(path), len(tree.tokens))
        if kind is not None:
            kind.watch.judged(len(path), len(tree.tokens))

    def observe(self, event: StepEvent) -> None:
        """Costs are counted in passes of the model, which do not depend on the machine."""

    def forget(self, seq: int) -> None:
        """What is known of all sequences stays."""
        for known in (self._live, self._of):
            known.pop(seq, None)
        self._trying.discard(seq)

    def nbytes(self) -> int:
        """Bytes of the networks."""
        return self._bytes

    # -- inside a draft ----------------------------------------------------------------------------------

    def exits(self, contexts: Sequence[DraftContext]) -> tuple[Sequence[int], Sequence[int]]:
        """Sequences that are drafted for, and all layers that one of them may leave."""
        chosen, layers = [], set()
        for i, context in enumerate(contexts):
            kind = self._kinds["greedy" if context.greedy else "sampled"]
            if not kind.drafts():
                continue
            chosen.append(i)
            self._of[context.seq] = kind
            live = self._live.setdefault(context.seq, _Live(kind.way.guard.learnt[0]))
            live.chain = 1.0
            looks = kind.learnt or not kind.way.fixed[0]
            (self._trying.add if looks else self._trying.discard)(context.seq)
            layers |= set(kind.way.limits.exits) if looks else {kind.way.fixed[0]}
        return chosen, sorted(layers)

    def leave(self, contexts: Sequence[DraftContext], logits: Tensor, layers: int) -> bool:
        """Whether the sequences together are better off drafting here than running on."""
        gain = 0.0
        readings = read(logits) if any(c.seq in self._trying for c in contexts) else [None] * len(contexts)
        for context, reading in zip(contexts, readings, strict=True):
            live = self._live[context.seq]
            live.layers = layers
            if reading is None or context.seq not in self._trying:
                gain += 1.0 if layers >= self._of[context.seq].way.fixed[0] else -1.0
                continue
            stop, go_on = self._worth(context, State(reading, layers, 0, live.recent))
            gain += stop - go_on
        return gain >= 0

    def go_on(self, context: DraftContext, logits: Tensor, drafted: int) -> bool:
        """Whether this sequence is better off with another draft than with the verdict."""
        live, way = self._live[context.seq], self._of[context.seq].way
        if context.seq not in self._trying:
            state = State(Reading(1.0, 0.0, 0.0), way.fixed[0], drafted, live.recent)
            return static(*way.fixed)(state) == GO_ON
        if drafted >= way.limits.longest:
            return False
        (reading,) = read(logits[None])
        live.chain *= reading.confidence
        stop, go_on = self._worth(context, State(reading, live.layers, drafted, live.recent, live.chain))
        return go_on > stop

    def _worth(self, context: DraftContext, state: State) -> tuple[float, float]:
        way = self._of[context.seq].way
        return way.values(state.vector(way.limits))
