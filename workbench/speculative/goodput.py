"""Goodput control: draft as much as pays on this machine now, and not at all where it does not.

Liu et al., *Optimizing Speculative Decoding for Serving LLMs Using Goodput* (arXiv 2406.14066, SmartSpec /
TurboSpec). Goodput is expected tokens per second of a step:
(sequences + Σ rates of the drafted nodes) / (step(rows + nodes) + draft(longest)). Instead of one length for
all, every (sequence, node) is ranked by its moving acceptance rate, and nodes are admitted in that order as
far as goodput grows: sequences that are drafted for badly get nothing, and as the batch fills the machine,
rows become dear and drafts end by themselves. Costs are measured in the running engine (``step_cost.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.engine.draft_seams import DraftTree
from workbench.spec.events import StepEvent
from workbench.spec.technique import Claim, TechniqueSpec, option
from workbench.speculative.hit_rates import Floats, HitRates
from workbench.speculative.step_cost import DraftCost, StepCost


@dataclass(frozen=True)
class Config:
    """Options of ``goodput``."""

    memory: int = option(
        3,
        low=2,
        high=1000,
        unit="drafts",
        help="Drafts that a sequence's own acceptance remembers; few, since text is copied in runs.",
    )
    margin: float = option(
        0.02, low=0.0, high=1.0, step=0.01, help="Expected gain below which nothing is drafted."
    )
    probe: int = option(
        24,
        low=1,
        high=1000,
        unit="steps",
        help="Steps between trials: a draft where there was none for that long, a longer one where drafts "
        "are short; every fourth time a step without drafts, to see what that costs.",
    )
    probe_tokens: int = option(8, low=1, high=64, unit="tokens", help="Length of such a trial.")


SPEC = TechniqueSpec(
    id="goodput",
    title="Goodput control",
    family="speculative",
    seam="control",
    kind="exact",
    summary="Adapts the length of drafts, or the size of draft trees, per sequence and step to moving "
    "acceptance and to measured costs; switches drafting off where it does not pay.",
    paper="https://arxiv.org/abs/2406.14066",
    stages=("draft",),
    claims_slot=("draft_control",),
    needs=("drafter",),
    claims=(
        Claim(
            "up to 3.2 times lower latency than without speculation",
            "vLLM, draft models and prompt lookup, several request rates (first version of the paper)",
            "https://arxiv.org/abs/2406.14066",
        ),
    ),
)


_PLAIN_EVERY = 4
_WARM_UP = 10  # drafts
_ALL_MEMORY = 100.0  # drafts, of all sequences together


@dataclass(frozen=True)
class Choice:
    """What was decided: nodes per sequence, and expected tokens per millisecond with and without drafts."""

    rooms: tuple[int, ...]
    goodput: float
    plain: float


def choose(
    rates: Sequence[Floats],
    rows: int,
    sequences: int,
    step: StepCost,
    draft: DraftCost,
    margin: float = 0.0,
) -> Choice:
    """Admit nodes in order of their rates as far as goodput grows; nothing below ``margin`` of gain.

    ``rates[i]`` [room_i] are sequence i's, never rising: what is admitted of it are its first nodes.
    """
    every = np.concatenate(rates) if rates else np.zeros(0)
    owner = np.repeat(np.arange(len(rates)), [len(r) for r in rates])
    index = np.concatenate([np.arange(len(r)) for r in rates]) if rates else np.zeros(0, np.int64)
    order = np.lexsort((owner, index, -every))
    gained = np.concatenate([[0.0], np.cumsum(every[order])]) + sequences
    longest = np.concatenate([[0], np.maximum.accumulate(index[order] + 1)]).astype(np.int64)
    ms = step(rows + np.arange(len(gained))) + draft(longest)
    goodput = gained / ms
    best = int(np.argmax(goodput))
    if goodput[best] < goodput[0] * (1 + margin):
        best = 0
    counts: NDArray[np.int64] = np.bincount(owner[order[:best]], minlength=len(rates))
    return Choice(tuple(counts.tolist()), float(goodput[best]), float(goodput[0]))


class GoodputControl:
    """The ``control`` seam: rates of each live sequence and of all, costs of steps and drafts."""

    name = "goodput"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.step_cost = StepCost()
        self.draft_cost = DraftCost()
        self.last: Choice | None = None
        self._all = HitRates(_ALL_MEMORY, weight=3.0)
        self._own: dict[int, HitRates] = {}
        self._idle: dict[int, int] = {}  # steps with short drafts or none
        self._since_probe = 0
        self._judged = 0
        self._asked = 0

    def rooms(self, asks: Sequence[tuple[int, int]], rows: int, sequences: int) -> list[int]:
        """Nodes per sequence that maximise goodput; before any cost is known, all that there is room for."""
        most = max(room for _, room in asks)
        known = [self._own.setdefault(s, HitRates(self.config.memory, weight=2.0)) for s, _ in asks]
        if not self.step_cost.known:
            self._asked = most
            return [room for _, room in asks]
        if self.step_cost.age(rows) > _PLAIN_EVERY * self.config.probe:
            return [0] * len(asks)  # what drafts are compared with must be fresh
        prior = self._all.rates(most)
        rates = [own.rates(room, prior[:room]) for own, (_, room) in zip(known, asks, strict=True)]
        self.last = choose(rates, rows, sequences, self.step_cost, self.draft_cost, self.config.margin)
        granted = list(self.last.rooms)
        if self._judged < _WARM_UP:  # rates of deep nodes are not guessed from those of the first
            granted = [room for _, room in asks]
        self._probe(asks, granted)
        self._asked = max(granted)
        return granted

    def judged(self, seq: int, tree: DraftTree, path: Sequence[int]) -> None:
        """Count what was accepted, for the sequence and for all."""
        self._judged += 1
        self._all.add(len(tree.tokens), path)
        if seq in self._own:  # it may have ended with this draft
            self._own[seq].add(len(tree.tokens), path)

    def observe(self, event: StepEvent) -> None:
        """Learn from steps without prompts; their cost is the whole step, drafting apart."""
        draft_ms = event.phase_ms.get("draft", 0.0)
        if self._asked:
            self.draft_cost.add(self._asked, draft_ms)
        self._asked = 0
        if event.decode and not event.prefill:
            self.step_cost.add(event.rows, event.total_ms - draft_ms)

    def forget(self, seq: int) -> None:
        """What is known of all sequences stays."""
        self._own.pop(seq, None)
        self._idle.pop(seq, None)

    def nbytes(self) -> int:
        """Bytes of counts and curves."""
        rates = self._all.nbytes() + sum(own.nbytes() for own in self._own.values())
        return rates + self.step_cost.nbytes()

    def _probe(self, asks: Sequence[tuple[int, int]], granted: list[int]) -> None:
        """Let the sequence whose drafts were short for longest try a long one: one at a time, rarely."""
        self._since_probe += 1
        trial = [min(room, self.config.probe_tokens) for _, room in asks]
        for (seq, _), n, most in zip(asks, granted, trial, strict=True):
            self._idle[seq] = 0 if n >= most else self._idle.get(seq, 0) + 1
        i = max(range(len(asks)), key=lambda j: self._idle[asks[j][0]])
        if min(self._since_probe, self._idle[asks[i][0]]) >= self.config.probe:
            granted[i] = trial[i]
            self._idle[asks[i][0]] = self._since_probe = 0


def bind(config: Config, context: Any = None) -> GoodputControl:
    """The control; what it needs to know it measures."""
    return GoodputControl(config)
