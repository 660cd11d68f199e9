"""Two places on a virtual clock: real tokens, real trees and real verdicts, with latencies that are entered.

The target is an engine whose drafter is a :class:`RemoteDrafter`; the drafter's side is a
:class:`DraftWorker`. Both do in this process exactly what they do in processes of their own; only when
something happens is computed. Everything drawn from here is *simulated*: real tokens, virtual clock. The same
engine, worker and latencies give the same log, event by event.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from workbench.engine.engine import Engine
from workbench.engine.executor import Executor, Prepared, StepOutput
from workbench.spec.errors import OptionError
from workbench.spec.events import RequestEvent, StepEvent
from workbench.speculative.placement.messages import DraftSync, Message
from workbench.speculative.placement.remote import RemoteDrafter, Told
from workbench.speculative.placement.worker import DraftWorker

Side = Literal["target", "draft"]


@dataclass(frozen=True)
class Latencies:
    """Seconds of a target step and of a drafter's batch by rows, and of a message on its way."""

    target: Callable[[int], float]
    draft: Callable[[int], float]
    link: float = 0.0

    def __post_init__(self) -> None:
        if not self.link >= 0:
            raise OptionError(f"link = {self.link} s is no latency.", hint="Enter 0 or more seconds.")


@dataclass(frozen=True)
class Busy:
    """One side at work: from, to (seconds, virtual), rows, and the nodes verified or made."""

    side: Side
    start: float
    end: float
    rows: int
    nodes: int


@dataclass
class Simulated:
    """What a run on the virtual clock did; ``kind`` travels with every number.

    ``outcomes``: of each verified draft, in order, whether the newest token was in the target's tree, and how
    old that was.
    """

    kind: Literal["simulated"] = "simulated"
    busy: list[Busy] = field(default_factory=list)
    steps: list[StepEvent] = field(default_factory=list)
    events: list[RequestEvent] = field(default_factory=list)
    outcomes: list[Told] = field(default_factory=list)
    waited: float = 0.0
    wall: float = 0.0

    def utilisation(self, side: Side) -> float | None:
        """Busy over wall; None where nothing ran."""
        spent = sum(b.end - b.start for b in self.busy if b.side == side)
        return spent / self.wall if self.wall else None

    def hidden(self) -> float | None:
        """Share of the drafter's time during which the target was at work too; None if it never worked."""
        target = [(b.start, b.end) for b in self.busy if b.side == "target"]
        draft = [(b.start, b.end) for b in self.busy if b.side == "draft"]
        total = sum(end - start for start, end in draft)
        both = sum(max(0.0, min(e, f) - max(s, t)) for s, e in draft for t, f in target)
        return both / total if total > 0 else None


class VirtualLink:
    """The target's link on the virtual clock; ``now`` is the target's time."""

    alive = True
    broken = ""

    def __init__(self, worker: DraftWorker, latencies: Latencies, out: Simulated) -> None:
        self.now = self.began = 0.0
        self._worker = worker
        self._latencies = latencies
        self._out = out
        self._drafter = 0.0  # until when the drafter's side was simulated
        self._unsent: list[Message] = []
        self._down: list[tuple[float, int, Message]] = []
        self._up: list[tuple[float, int, Message]] = []
        self._order = 0

    def send(self, message: Message) -> None:
        """A stream starts when it is met; all else is known when the step is over (:meth:`end`)."""
        if isinstance(message, DraftSync):
            self._post(self._down, self.now, message)
        else:
            self._unsent.append(message)

    def poll(self, wait: float = 0.0) -> list[Message]:
        """Messages that are there; if none, virtual time passes until the first, or for ``wait``."""
        self._advance(self.now)
        if wait > 0 and not (self._up and self._up[0][0] <= self.now):
            began, until = self.now, self.now + wait
            while not (self._up and self._up[0][0] <= until) and self._step(until):
                pass
            self.now = min(until, max(self._up[0][0], began)) if self._up else until
            self._out.waited += self.now - began
        out = []
        while self._up and self._up[0][0] <= self.now:
            out.append(heapq.heappop(self._up)[2])
        return out

    def clock(self) -> float:
        """The target's time."""
        return self.now

    def passed(self, rows: int) -> None:
        """The target runs so many rows: time passes for it."""
        self.began = self.now
        self.now += self._latencies.target(rows)

    def nbytes(self) -> int:
        """Bytes of the drafter's KV."""
        return self._worker.kv.nbytes()

    def end(self) -> None:
        """The target's step is over: what it had to say goes out."""
        for message in self._unsent:
            self._post(self._down, self.now, message)
        self._unsent.clear()

    def finish(self) -> None:
        """Nothing runs any more: the drafter's side is told the rest, at no time, so that it lets go."""
        while self._down:
            self._worker.handle(heapq.heappop(self._down)[2])

    def _post(self, queue: list[tuple[float, int, Message]], at: float, message: Message) -> None:
        self._order += 1
        heapq.heappush(queue, (at + self._latencies.link, self._order, message))

    def _advance(self, until: float) -> None:
        while self._step(until):
            pass

    def _step(self, until: float) -> bool:
        """One thing that the drafter's side begins before ``until``; false where there is none."""
        while self._down and self._down[0][0] <= self._drafter:
            answer = self._worker.handle(heapq.heappop(self._down)[2])
            if answer is not None:
                self._post(self._up, self._drafter, answer)
        if self._worker.has_work and self._drafter < until:
            tail, rows = self._worker.work()
            start, self._drafter = self._drafter, self._drafter + self._latencies.draft(rows)
            nodes = len(tail.nodes) if tail is not None else 0
            self._out.busy.append(Busy("draft", start, self._drafter, rows, nodes))
            if tail is not None:
                self._post(self._up, self._drafter, tail)
            return True
        if self._down and self._down[0][0] <= until:
            self._drafter = max(self._drafter, self._down[0][0])
            return True
        if not self._worker.has_work:
            self._drafter = max(self._drafter, until)
        return False


class _Timed(Executor):
    """An executor whose passes take virtual time, so that what they led to is known when they end."""

    def __init__(self, inner: Executor, link: VirtualLink) -> None:
        self.__dict__.update(vars(inner))
        self._link = link

    def forward(self, step: Prepared, *args: Any, **more: Any) -> StepOutput:
        """The pass; the target's clock goes on by it."""
        out = super().forward(step, *args, **more)
        self._link.passed(len(step.ids))
        return out


def simulate(
    make: Callable[[VirtualLink], Engine],
    worker: DraftWorker,
    latencies: Latencies,
    *,
    max_steps: int = 100_000,
) -> Simulated:
    """Run an engine until it is idle. ``make(link)`` gives it, with requests, its drafter on the link."""
    out = Simulated()
    link = VirtualLink(worker, latencies, out)
    engine = make(link)
    for _ in range(max_steps):
        if not engine.has_work:
            link.finish()
            return out
        if not isinstance(engine.executor, _Timed):
            engine.executor = _Timed(engine.executor, link)
        link.began = link.now
        step, events = engine.step()
        link.end()
        out.busy.append(Busy("target", link.began, link.now, step.rows, step.draft))
        out.steps.append(step)
        drafter = engine.drafting.drafter
        if isinstance(drafter, RemoteDrafter):
            out.outcomes += drafter.told()
        out.events += events
        out.wall = link.now
    raise OptionError(f"The engine still has work after {max_steps} steps.", hint="Ask for fewer tokens.")
