"""Peers that stream tokens: what a benchmark reads off the moments at which tokens came.

A serving engine gives tokens one step at a time, each step some tokens of each running sequence. From these
arrivals follow time to first token, the whole job, and the steps in which the full batch decoded: the same
quantities that :mod:`workbench.core.benchmark_engine` times of our own engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from workbench.core.benchmark_engine import random_prompts
from workbench.core.benchmark_openmp import end_idle_threads
from workbench.core.benchmark_timing import Turn
from workbench.core.peers import Measure
from workbench.spec.errors import JobFailed


class Arrival(NamedTuple):
    """``tokens`` new tokens of a sequence were there at the moment ``at`` (``perf_counter`` seconds)."""

    at: float
    sequence: int
    tokens: int


Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], tuple[float, Sequence[Arrival]]]
"""Prompts and tokens to make of each → the moment of submission and the arrivals, in order of time."""


@dataclass
class Streaming:
    """A contestant made of a peer's ``generate``; sizes as in :data:`workbench.core.benchmark.BENCHES`."""

    name: str
    note: str
    generate: Generate
    vocab: int
    measure: Measure
    batch: int = 1
    context: int = 512
    tokens: int = 16

    def turn(self, seed: int) -> Turn:
        """One job on the prompts that our engine gets too, never seen before by any cache."""
        prompts = random_prompts(self.vocab, self.batch, self.context, seed)
        extra = {"decode": 1, "whole": 0}  # the first token is the prefill's
        made = self.tokens + extra[self.measure] if self.measure in extra else 1
        end_idle_threads()
        start, arrivals = self.generate(prompts, made)
        came = sum(a.tokens for a in arrivals)
        if came != made * self.batch:
            raise JobFailed(self.name, f"{came} tokens came of {made} for each of {self.batch} prompts")
        if self.measure == "decode":
            return decode_turn(arrivals, self.batch)
        if self.measure == "whole":
            return Turn(arrivals[-1].at - start, came)
        amount = self.batch * self.context if self.measure == "prefill" else 1
        return Turn(arrivals[0].at - start, amount)


def decode_turn(arrivals: Sequence[Arrival], batch: int) -> Turn:
    """The steps in which all sequences ran, marked by the arrivals of the one whose first token came last.

    From its first token to its last one before which no sequence had ended, give or take the moments within
    a step; the amount is all tokens that came in between. Raises :class:`JobFailed` when there is no step.
    """
    came = [a for a in arrivals if a.tokens]
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    for a in came:
        first.setdefault(a.sequence, a.at)
        last[a.sequence] = a.at
    latest = max(first, key=first.__getitem__, default=-1)
    marks = [a.at for a in came if a.sequence == latest]
    ended = min(last.values(), default=0.0)
    full = [at for before, at in pairwise(marks) if before < ended]
    if len(first) < batch or not full:
        raise JobFailed("decode", "its sequences never decoded all together", hint="Ask for more tokens.")
    return Turn(full[-1] - marks[0], sum(a.tokens for a in came if marks[0] < a.at <= full[-1]))
