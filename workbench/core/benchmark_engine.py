"""Our own engine as a contestant: decode, prefill, whole batches, a pool full of idle pages, shared prefixes.

Prompts are random token ids, drawn anew for every turn, so that nothing is found in a cache that is not meant
to be. End tokens are ignored: every contestant does the same number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from workbench.core.benchmark_timing import Stopwatch, Turn
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.events import StepEvent


def random_prompts(vocab: int, count: int, length: int, seed: int) -> list[list[int]]:
    """``count`` prompts of ``length`` ids; the same for the same seed."""
    gen = torch.Generator().manual_seed(seed)
    ids: list[list[int]] = torch.randint(0, vocab, (count, length), generator=gen).tolist()
    return ids


@dataclass
class _OnEngine:
    """What the cells share: an idle engine, and how a turn begins and ends."""

    name: str
    engine: Engine
    device: str = "cpu"
    steps: list[StepEvent] = field(default_factory=list)
    note: str = ""

    def add(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        for i, ids in enumerate(prompts):
            self.engine.add(Request(f"b{i}", tuple(ids), SamplingParams(max_tokens=tokens, ignore_eos=True)))

    def step(self) -> tuple[StepEvent, int]:
        with torch.inference_mode():
            step, events = self.engine.step()
        return step, sum(len(e.tokens) for e in events)

    def drain(self) -> None:
        self.engine.reset()

    def prefill(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Add prompts and step until every one of them decodes."""
        self.add(prompts, tokens)
        first: set[str] = set()
        while len(first) < len(prompts):
            with torch.inference_mode():
                _, events = self.engine.step()
            first |= {e.request_id for e in events if e.tokens}


@dataclass
class Decode(_OnEngine):
    """``batch`` sequences with ``context`` tokens each; a turn is ``tokens`` steps of all of them."""

    batch: int = 1
    context: int = 512
    tokens: int = 16

    def turn(self, seed: int) -> Turn:
        """Prefill outside the clock, then time the decode steps."""
        budget = (self.tokens + 1) * (self.engine.drafting.max_draft + 1) + 1
        self.prefill(random_prompts(self.engine.vocab_size, self.batch, self.context, seed), budget)
        made, steps = 0, list[StepEvent]()
        with Stopwatch(self.device) as watch:
            # Accepted drafts may reach the end of the context early: a batch with a gap is not timed.
            while len(steps) < self.tokens and len(self.engine.scheduler.running) == self.batch:
                step, n = self.step()
                made += n
                steps.append(step)
        self.drain()
        self.steps += steps if seed else []  # seed 0 is the warm-up
        return Turn(watch.seconds, made)


@dataclass
class Prefill(_OnEngine):
    """One prompt of ``context`` tokens to its first token: the amount is prompt tokens."""

    context: int = 512

    def turn(self, seed: int) -> Turn:
        """Time to first token of a prompt never seen before."""
        prompts = random_prompts(self.engine.vocab_size, 1, self.context, seed)
        with Stopwatch(self.device) as watch:
            self.prefill(prompts, 1)
        self.drain()
        return Turn(watch.seconds, self.context)


@dataclass
class Batch(_OnEngine):
    """``batch`` prompts of ``context`` tokens, ``tokens`` answers each, from submission to the last token."""

    batch: int = 8
    context: int = 128
    tokens: int = 32

    def turn(self, seed: int) -> Turn:
        """Time the whole job; the amount is generated tokens."""
        prompts = random_prompts(self.engine.vocab_size, self.batch, self.context, seed)
        made = 0
        with Stopwatch(self.device) as watch:
            self.add(prompts, self.tokens)
            while self.engine.has_work:
                made += self.step()[1]
        return Turn(watch.seconds, made)


@dataclass
class IdlePages(Decode):
    """Decode while ``share`` of the pool holds cached pages of finished prompts."""

    share: float = 0.0

    def turn(self, seed: int) -> Turn:
        """Fill the pool with cached pages, outside the clock, then decode."""
        kv = self.engine.kv
        kv.forget_prefixes()
        size = self.context or kv.page_size
        number = 0
        while kv.pools[0].cached < self.share * kv.pools[0].pages:
            before = kv.pools[0].cached
            prompt = random_prompts(self.engine.vocab_size, 1, size, 7_919 * (seed + 1) + number)
            self.prefill(prompt, 1)
            self.drain()
            number += 1
            if kv.pools[0].cached <= before:  # full: another prompt only replaces older pages
                break
        return super().turn(seed)


@dataclass
class SharedPrefix(_OnEngine):
    """Time to first token of a prompt whose first ``context`` tokens are the same in every turn."""

    context: int = 512
    suffix: int = 32

    def turn(self, seed: int) -> Turn:
        """The first turn computes the prefix for the others; the amount is one first token."""
        shared = random_prompts(self.engine.vocab_size, 1, self.context, 1_000_003)[0]
        own = random_prompts(self.engine.vocab_size, 1, self.suffix, seed)[0]
        with Stopwatch(self.device) as watch:
            self.prefill([shared + own], 1)
        self.drain()
        return Turn(watch.seconds, 1)
