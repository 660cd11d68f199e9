"""What two places did, when: one record of a run, measured or simulated, that every figure is drawn from.

A side at work is a span, between two spans it waits; a message has its way from one side to the other; a
round has its verdict, and whether what the drafter had made ahead served it. Times are seconds from the
record's start; ``tag`` says whose clock they are of: the machine's, or a virtual one under real tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from workbench.spec.errors import OptionError
from workbench.speculative.placement.timeline import MirrorRound, MirrorTimes
from workbench.speculative.placement.virtual import Side, Simulated

Work = Literal["prompt", "plain", "verify", "early", "late", "draft", "branches"]


@dataclass(frozen=True)
class Span:
    """One side at work on ``rows`` rows: the target on a step or a part of one, the drafter on a batch."""

    side: Side
    start: float
    end: float
    work: Work
    rows: int = 0
    nodes: int = 0


@dataclass(frozen=True)
class Sent:
    """A message from ``start`` to ``end`` (the same where its arrival is not known), to ``to``."""

    start: float
    end: float
    to: Side
    what: str


@dataclass(frozen=True)
class Round:
    """A verified draft: ``verdict`` is when it was known. ``hit``: what was made ahead served what came next,
    None where nobody can say. ``age``: verdicts that the tree had outlived, None where none lives on."""

    verdict: float
    drafted: int
    accepted: int
    emitted: int
    hit: bool | None
    age: int | None = None


@dataclass(frozen=True)
class Trace:
    """``plain`` tokens came from steps without a draft; ``notes``: what whoever reads it should know."""

    title: str
    tag: Literal["measured", "simulated"]
    wall: float
    spans: tuple[Span, ...]
    sent: tuple[Sent, ...] = ()
    rounds: tuple[Round, ...] = ()
    plain: int = 0
    notes: tuple[str, ...] = ()

    @property
    def emitted(self) -> int:
        """Tokens of all rounds and plain steps."""
        return sum(r.emitted for r in self.rounds) + self.plain

    def speedup(self, plain: float) -> float:
        """Plain time over the record's, ``plain`` seconds a token. Raises :class:`OptionError` for none."""
        if not self.emitted or self.wall <= 0:
            raise OptionError("Nothing was generated.", hint="Run a prompt first.")
        return plain * self.emitted / self.wall

    @property
    def hit_rate(self) -> float | None:
        """Share of rounds whose outcome was foreseen; None where none was judged."""
        told = [r.hit for r in self.rounds if r.hit is not None]
        return sum(told) / len(told) if told else None

    @property
    def ages(self) -> tuple[int, ...]:
        """Of each verdict on a tree that lives on: earlier ones since it last started anew."""
        return tuple(r.age for r in self.rounds if r.age is not None)

    @property
    def wasted(self) -> float | None:
        """Nodes made and not accepted, per emitted token: what the overlap costs in work."""
        made = sum(s.nodes for s in self.spans if s.side == "draft")
        return (made - sum(r.accepted for r in self.rounds)) / self.emitted if self.emitted else None

    def busy(self, side: Side) -> float:
        """Share of the wall clock during which a side works."""
        spent = sum(end - start for start, end in self._times(side))
        return spent / self.wall if self.wall > 0 else 0.0

    def hidden(self) -> float | None:
        """Share of the drafter's time during which the target works too; None if the drafter never worked."""
        target, draft = self._times("target"), self._times("draft")
        total = sum(end - start for start, end in draft)
        both = sum(max(0.0, min(e, f) - max(s, t)) for s, e in draft for t, f in target)
        return both / total if total > 0 else None

    def waits(self, side: Side) -> list[tuple[float, float]]:
        """The bubbles: where a side does nothing."""
        out: list[tuple[float, float]] = []
        last = 0.0
        for start, end in self._times(side):
            if start > last:
                out.append((last, start))
            last = end
        return [*out, (last, self.wall)] if self.wall > last else out

    def _times(self, side: Side) -> list[tuple[float, float]]:
        """Spans of a side, none of them over another, within the record."""
        found = sorted((max(s.start, 0.0), min(s.end, self.wall)) for s in self.spans if s.side == side)
        out: list[tuple[float, float]] = []
        for start, end in found:
            if end > start:
                start = max(start, out[-1][1]) if out else start
                out += [(start, end)] if end > start else []
        return out


def of_simulated(done: Simulated, title: str, link: float = 0.0) -> Trace:
    """The record of a run on the virtual clock; ``link``: seconds that its messages took."""
    spans: list[Span] = []
    steps = iter(done.steps)
    rounds: list[Round] = []
    sent: list[Sent] = []
    plain = 0
    outcomes = iter(done.outcomes)
    for busy in done.busy:
        if busy.side == "draft":
            spans.append(Span("draft", busy.start, busy.end, "draft", busy.rows, busy.nodes))
            sent += [Sent(busy.end, busy.end + link, "target", "nodes")] * bool(busy.nodes)
            continue
        step = next(steps)
        spans.append(Span("target", busy.start, busy.end, work_of(step.prefill, step.draft), step.rows))
        sent += [Sent(busy.end, busy.end + link, "draft", "verdict")] * bool(step.decode)
        gained = sum(len(e.tokens) for e in done.events if e.step == step.step)
        made = [
            Round(busy.end, len(d.tokens), len(d.accepted), d.emitted, *next(outcomes, (None, None)))
            for d in step.drafts
        ]
        rounds += made
        plain += gained - sum(r.emitted for r in made)
    return Trace(title, "simulated", done.wall, tuple(spans), tuple(sent), tuple(rounds), plain)


def of_mirror(
    rounds: Sequence[MirrorRound], times: MirrorTimes, title: str, facts: Iterable[Mapping[str, int]] = ()
) -> Trace:
    """The record of Mirror's rounds on the virtual clock; ``facts``: rows and nodes of each, where known."""
    spans: list[Span] = []
    sent: list[Sent] = []
    told: list[Round] = []
    known = iter(facts)
    for r in rounds:
        about = next(known, {})
        early = r.start + times.early
        window, nodes = about.get("window", 0), about.get("nodes", 0)
        spans += [
            Span("target", r.start, early, "early", window + 1),
            Span("target", early, r.verdict, "late", window + 1),
            Span("draft", *r.branches, "branches", about.get("rows", 0), nodes),
        ]
        sent.append(Sent(early, early + times.link, "draft", "candidates"))
        sent.append(Sent(r.verdict, r.verdict + times.link, "draft", "verdict"))
        if r.fresh is not None:
            spans.append(Span("draft", *r.fresh, "draft", window, window))
        sent.append(Sent(r.end - times.link, r.end, "target", "window"))
        told.append(Round(r.verdict, window, r.emitted - 1, r.emitted, r.hit))
    wall = rounds[-1].end if rounds else 0.0
    return Trace(title, "simulated", wall, tuple(spans), tuple(sent), tuple(told))


def work_of(prefill: int, drafted: int) -> Work:
    """What a step of the target is called."""
    return "prompt" if prefill else "verify" if drafted else "plain"
