"""A run of a target whose drafter is elsewhere: what both sides did, when, as a record to draw and to count.

The engine is this process's; what it gives out is the plain run's, whatever the drafter does.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch

from workbench.engine.draft_seams import Drafter
from workbench.engine.engine import Engine
from workbench.engine.sequence import Request
from workbench.engine.split_runner import PeekingDrafter, SplitRunner
from workbench.spec.events import RequestEvent, StepEvent
from workbench.speculative.placement.messages import Candidates, TailStream, Worked
from workbench.speculative.placement.process_link import ProcessLink, pinned_cores
from workbench.speculative.placement.remote import RemoteDrafter, Told
from workbench.speculative.placement.trace import Round, Sent, Span, Trace, work_of
from workbench.speculative.verify import ExactVerify

_WORDS = {"VerifyCommit": "verdict", "Candidates": "candidates", "TailStream": "drafts"}


@dataclass(frozen=True)
class TwoPlaces:
    """What a run did: steps and events, and both sides at work by the system's monotonic clock (seconds).

    ``outcomes``: of each draft that was judged, in order, whether what came next was there, and how old the
    tree; ``traffic``: when messages were sent and taken. ``start`` is when the last prompt had been read.
    """

    steps: tuple[StepEvent, ...]
    events: tuple[RequestEvent, ...]
    target: tuple[Worked, ...]
    draft: tuple[Worked, ...]
    start: float
    end: float
    outcomes: tuple[Told, ...] = ()
    traffic: tuple[tuple[float, str], ...] = ()

    @property
    def decoded(self) -> int:
        """Tokens gained behind the prompts."""
        first = self._first
        return (
            sum(len(e.tokens) for e in self.events if e.step >= self.steps[first].step) if self.steps else 0
        )

    @property
    def seconds(self) -> float:
        """From the last prompt's end to the last token."""
        return self.target[-1].end - self.start if self.target else 0.0

    def trace(self, title: str) -> Trace:
        """The record of all that came behind the prompts."""
        first, zero = self._first, self.start
        spans: list[Span] = []
        rounds: list[Round] = []
        plain = 0
        outcomes = iter(self.outcomes)
        looks = [at for at, what in self.traffic if what == Candidates.__name__]
        for step, work in zip(self.steps[first:], self.target[first:], strict=True):
            start, end = work.start - zero, work.end - zero
            look = next((at - zero for at in looks if work.start <= at <= work.end), None)
            kind = work_of(step.prefill, step.draft)
            if look is None:
                spans.append(Span("target", start, end, kind, step.rows))
            else:
                spans.append(Span("target", start, look, "early", step.rows))
                spans.append(Span("target", look, end, "late", step.rows))
            made = [
                Round(end, len(d.tokens), len(d.accepted), d.emitted, *next(outcomes, (None, None)))
                for d in step.drafts
            ]
            rounds += made
            gained = sum(len(e.tokens) for e in self.events if e.step == step.step)
            plain += gained - sum(r.emitted for r in made)
        wall = self.seconds
        for work in self.draft:
            start, end = max(work.start - zero, 0.0), min(work.end - zero, wall)
            if end > start:
                spans.append(Span("draft", start, end, "draft", work.rows, work.nodes))
        sent = [
            Sent(at - zero, at - zero, "target" if what == TailStream.__name__ else "draft", _WORDS[what])
            for at, what in self.traffic
            if what in _WORDS and 0.0 <= at - zero <= wall
        ]
        return Trace(title, "measured", wall, tuple(spans), tuple(sent), tuple(rounds), plain)

    @property
    def _first(self) -> int:
        """The first step behind those that read prompts."""
        return max((i for i, s in enumerate(self.steps) if s.prefill), default=-1) + 1

    def utilisation(self, side: Sequence[Worked]) -> float:
        """Busy over wall of one side."""
        spent = sum(max(0.0, min(w.end, self.end) - max(w.start, self.start)) for w in side)
        return spent / (self.end - self.start)

    def ids(self, request_id: str) -> list[int]:
        """Output ids of a request."""
        return [t.id for e in self.events if e.request_id == request_id for t in e.tokens]


def remote_engine(engine: Engine, drafter: Drafter) -> Engine:
    """The idle engine's parts with this drafter, judged by the exact rule of each draft."""
    return Engine(
        engine.executor,
        engine.kv,
        engine.scheduler,
        context=engine.context,
        eos_ids=engine.eos_ids,
        drafter=drafter,
        runner=SplitRunner(engine.executor, drafter) if isinstance(drafter, PeekingDrafter) else None,
        verify=ExactVerify(),
        make_stream=engine.make_stream,
        static_bytes=engine.static_bytes,
        path=(*engine.path, f"draft:{drafter.name}"),
    )


def run_two_places(
    engine: Engine, link: ProcessLink | None, requests: Iterable[Request], cores: Sequence[int] = ()
) -> TwoPlaces:
    """Run requests until all have ended; the calling thread is bound to ``cores`` meanwhile.

    ``engine`` drafts over ``link`` (:func:`remote_engine`); None: at one place, to compare with.
    """
    steps = two_places(engine, link, requests, cores)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            done: TwoPlaces = end.value
            return done


def two_places(
    engine: Engine, link: ProcessLink | None, requests: Iterable[Request], cores: Sequence[int] = ()
) -> Generator[list[RequestEvent], None, TwoPlaces]:
    """The same, what was said after every step, for whoever wants to look or to stop in between."""
    before = pinned_cores(()) if cores else ()
    if cores:
        pinned_cores(cores)
    steps: list[StepEvent] = []
    events: list[RequestEvent] = []
    target: list[Worked] = []
    start = began = time.monotonic()
    drafter = engine.drafting.drafter
    if isinstance(drafter, RemoteDrafter):
        drafter.told()  # of earlier runs
    try:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            at = time.monotonic()
            with torch.inference_mode():
                step, gained = engine.step()
            # A placed drafter only lets the target wait in its phase; any other one works there.
            at += step.phase_ms.get("draft", 0.0) / 1e3 if link is not None else 0.0
            target.append(Worked(at, time.monotonic(), step.rows, step.draft))
            steps.append(step)
            events += gained
            if step.prefill:
                start = target[-1].end
            yield gained
        if link is not None:
            link.poll()  # what the drafter says it did
    finally:
        engine.reset()
        if before:
            pinned_cores(before)
    return TwoPlaces(
        tuple(steps),
        tuple(events),
        tuple(target),
        tuple(w for w in link.worked if w.end > began) if link is not None else (),
        start,
        time.monotonic(),
        tuple(drafter.told()) if isinstance(drafter, RemoteDrafter) else (),
        tuple(t for t in link.traffic if t[0] >= began) if link is not None else (),
    )
