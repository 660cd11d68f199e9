"""A run as it grows: events in, the numbers and words on screen out.

Written by the session's worker, read by the publisher; the controller's lock guards both. Latency follows the
definitions of ``workbench.core.report``; acceptance is computed where it always is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.spec.events import KV_IN_USE, PHASES, DraftRecord, RequestEvent, StepEvent, TokenInfo, fullest
from workbench.speculative.stats import acceptance
from workbench.widgets.kv_views.page_changes import Change, changes, number
from workbench.widgets.spec_views.badge import kind_of
from workbench.widgets.spec_views.panel_drafts import DraftsTab

MAX_TOKENS = 4000  # tokens kept on screen
PAGES_S = 0.1  # seconds between two pictures of the pages, at most
STRIP = 120  # steps in the strip
MAX_CHANGES = 400  # of what happened to pages


@dataclass
class LiveRun:
    """What one run has shown so far. Times are seconds of ``perf_counter``."""

    place: str  # model, number format, device, recipe
    recipe: str
    submitted: float
    total: int
    kind: str  # exact, lossy, simulated
    decode: Callable[[Sequence[int]], str]
    uses: Sequence[Mapping[str, Any]] = ()  # the recipe's entries
    ready: Callable[[], float] = float  # since when the engine was there; TTFT counts from then
    stream: Any = None  # StreamDecoder: text per token of the first sample
    pieces: list[list[Any]] = field(default_factory=list)  # [text, source, step, logprob]
    steps: list[StepEvent] = field(default_factory=list)
    drafts: list[DraftRecord] = field(default_factory=list)
    tokens: int = 0
    first: tuple[float, int] | None = None  # (time, tokens) of the first delivery
    last: float = 0.0
    plain: int = 0
    samples: set[int] = field(default_factory=set)
    pages: Any = None  # PageSnapshot of the latest moment at which a sequence ran
    changes: list[Change] = field(default_factory=list)  # what happened to pages, as far as it was seen
    _tab: DraftsTab | None = None
    _looked: float = 0.0
    _running: int = 0
    _again: bool = False
    _names: dict[tuple[str, int], int] = field(default_factory=dict)

    def take_step(self, event: StepEvent) -> None:
        """One engine step."""
        self.steps.append(event)
        self.drafts.extend(event.drafts)

    def look_at_pages(self, event: StepEvent, snapshot: Callable[[], Any]) -> None:
        """Keep who holds which page, as often as a screen shows it, and what happened between two looks.

        Of a short run, which is over before a screen shows it twice, it is the more often: what stays on
        screen when it has ended is never older than a tenth of it.
        Sequences that begin, fork or end are looked at whenever they do, and in the step after: a copy before
        the first write would be over before the next picture.
        """
        begun, self._running = event.running != self._running, event.running
        pause = min(PAGES_S, (event.time - self.submitted) / 10)
        if not (begun or self._again) and event.time - self._looked < pause:
            return
        self._again = begun
        found = snapshot()
        if found is not None and any(g.sequences for g in found.groups):
            self.changes += changes(self.pages, found, number(found, self._names))
            del self.changes[:-MAX_CHANGES]
            self.pages, self._looked = found, event.time

    def take(self, event: RequestEvent) -> None:
        """What the request gained; text of the first sample is shown."""
        self.samples.add(event.sample)
        self.plain += sum(t.source == "plain" for t in event.tokens)
        if event.tokens:
            self.tokens += len(event.tokens)
            self.first = self.first or (event.time, self.tokens)
            self.last = event.time
        if event.sample == 0:
            self.pieces.extend(self._split(event))
            del self.pieces[:-MAX_TOKENS]

    def _split(self, event: RequestEvent) -> list[list[Any]]:
        """The event's text cut at its tokens; joined, the parts are the event's text."""
        parts = [self._piece(t) for t in event.tokens]
        texts = [self.stream.push([t.id]) if self.stream is not None else "" for t in event.tokens]
        rest = event.text
        for part, text in zip(parts, texts, strict=True):
            part[0] = text if rest.startswith(text) else rest
            rest = rest[len(part[0]) :]
        if rest:  # held back earlier (half a character, a possible stop string)
            if parts:
                parts[-1][0] += rest
            else:
                parts.append([rest, "plain", event.step, None])
        return [p for p in parts if p[0]]

    @staticmethod
    def _piece(token: TokenInfo) -> list[Any]:
        return ["", token.source, token.step, token.logprob]

    # -- what is shown --------------------------------------------------------------------------------

    def latency(self) -> dict[str, float]:
        """TTFT and TPOT in ms, decode speed in tokens/s; what cannot be known yet is left out."""
        if self.first is None:
            return {}
        out = {"ttft": (self.first[0] - max(self.submitted, self.ready())) * 1e3}
        later, span = self.tokens - self.first[1], self.last - self.first[0]
        if later > 0 and span > 0:
            out["decode_speed"] = later / span
            out["tpot"] = span * 1e3 / later * max(len(self.samples), 1)
        return out

    def memory(self) -> dict[str, int]:
        """Bytes by category at the fullest step, as a run reports them."""
        return dict(fullest(self.steps) or {})

    def acceptance(self) -> dict[str, Any]:
        """τ, rate and survival by position; empty when nothing was drafted."""
        if not self.drafts:
            return {}
        a = acceptance(self.drafts, self.plain)
        return {"tau": a.tau, "rate": a.rate, "survival": list(a.survival), "steps": a.steps}

    def strip(self) -> list[dict[str, Any]]:
        """The last steps: milliseconds per phase, and rows forwarded."""
        return [
            {"step": s.step, "rows": s.rows, "ms": [s.phase_ms.get(p, 0.0) for p in PHASES]}
            for s in self.steps[-STRIP:]
        ]

    def kv_line(self, points: int = 160) -> list[int]:
        """KV bytes in use over the run, at most ``points`` of them."""
        values = [sum(s.bytes.get(k, 0) for k in KV_IN_USE) for s in self.steps]
        while values and not values[-1]:
            values.pop()  # the step that ended the run had already given its pages back
        stride = -(-len(values) // points) or 1
        return values[::stride]

    def draft(self) -> dict[str, Any]:
        """The latest verified draft: each drafted token's text, whether it was kept, its depth in the tree
        (0: right behind the committed text), and the text of the token it follows."""
        if not self.drafts:
            return {}
        d = self.drafts[-1]
        kept = set(d.accepted[: d.emitted])
        texts, depths = [self.decode([t]) for t in d.tokens], list[int]()
        for parent in d.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return {
            "tokens": [
                [texts[i], i in kept, depths[i], texts[p] if p >= 0 else ""] for i, p in enumerate(d.parents)
            ],
            "source": d.source,
            "rule": d.rule,
            "kind": kind_of([d]),
        }

    def drafts_tab(self) -> dict[str, Any]:
        """The latest rounds as trees, and what all of them come to; empty when nothing was drafted."""
        self._tab = self._tab or DraftsTab(self.decode)
        return self._tab.drawn(self.steps, self.plain)

    @property
    def path(self) -> tuple[str, ...]:
        """The code really taken by the latest step."""
        return self.steps[-1].path if self.steps else ()
