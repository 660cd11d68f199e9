"""Who waits for whom? Target and drafter at two places: their work, bubbles, messages, and the verdicts.

One picture for what was measured between two processes and for what a virtual clock says of devices that are
not there; the title says which. A round whose outcome was foreseen goes on with what was made ahead of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from workbench.spec.errors import OptionError
from workbench.speculative.placement.trace import Round, Span, Trace
from workbench.widgets.lanes import Box, Frame, Kind, Lanes
from workbench.widgets.palette import PHASES, SOURCES, Theme
from workbench.widgets.table import Table

TAGS = {"measured": "measured", "simulated": "simulated clock, real tokens"}
_COLOURS = {key: colour for key, _, colour in PHASES}
_GREY = _COLOURS["schedule"]
KINDS = (
    Kind("plain", "plain step", SOURCES["plain"]),
    Kind("verify", "verifies", _COLOURS["forward"]),
    Kind("early", "before the exit", _COLOURS["forward"], "/"),
    Kind("late", "behind the exit", _COLOURS["forward"]),
    Kind("draft", "drafts", _COLOURS["draft"]),
    Kind("branches", "branches", _COLOURS["draft"], "\\"),
    Kind("wait", "waits", _GREY, ".", hollow=True, dash=True),
    Kind("sent", "message", _COLOURS["sample"]),
    Kind("hit", "foreseen", SOURCES["accepted"], "x", hollow=True),
    Kind("miss", "not foreseen", SOURCES["corrected"], "/", hollow=True),
)
LANES = ("target", "drafter", "messages", "verdicts")
_ON = {"target": 0, "draft": 1}
_NAMES = {
    "prompt": "reads a prompt", "plain": "plain step", "verify": "verifies",
    "early": "layers before the exit", "late": "layers behind the exit",
    "draft": "drafts", "branches": "continues branches",
}  # fmt: skip
_THIN = 0.004  # of a frame: what a moment is drawn as


@dataclass(frozen=True)
class TwoLanes:
    """A record, ``rounds`` rounds a picture, at most ``most`` pictures."""

    trace: Trace
    rounds: int = 8
    most: int = 16

    @property
    def tag(self) -> str:
        """Whose clock it is, in words."""
        return TAGS[self.trace.tag]

    def lanes(self) -> Lanes:
        """The picture; raises :class:`OptionError` for a record without a step."""
        windows = list(self._windows())[: self.most]
        if not windows or self.trace.wall <= 0:
            raise OptionError("The record holds no step of the target.", hint="Generate something first.")
        left = max(0, len(self.trace.rounds) - self.rounds * self.most)
        note = " ".join((*self.trace.notes, *([f"{left} rounds more are left out"] if left else [])))
        return Lanes(
            f"{self.trace.title}: who waits for whom ({self.tag})",
            "ms from the first round shown",
            LANES,
            KINDS,
            tuple(self._frame(start, end) for start, end in windows),
            knob="rounds",
            note=note,
        )

    def figure(self, theme: Theme = "auto") -> Any:
        """The plotly figure, with a slider where there are many rounds."""
        return self.lanes().figure(theme)

    def live(self) -> Any:
        """The same with a slider that the keyboard moves."""
        return self.lanes().live()

    def table(self) -> Table:
        """What the picture adds up to."""
        t = self.trace
        rows = [
            ("tokens", t.emitted, ""),
            ("time a token", t.wall / t.emitted * 1e3 if t.emitted else None, "ms"),
            ("tokens a round", sum(r.emitted for r in t.rounds) / len(t.rounds) if t.rounds else None, ""),
            ("target at work", t.busy("target"), "of the time"),
            ("drafter at work", t.busy("draft"), "of the time"),
            ("drafting hidden behind the target", t.hidden(), "of drafting"),
            ("outcomes foreseen", t.hit_rate, "of rounds"),
            *self._ages(),
            ("drafted in vain", t.wasted, "nodes a token"),
            ("messages", len(t.sent), ""),
        ]
        tag = t.tag
        return Table.of(
            ("", "value", "unit", "tag"),
            [(name, _short(value), unit, tag) for name, value, unit in rows],
            note=" ".join((f"{t.title}: {self.tag}; behind the prompt, {len(t.rounds)} rounds.", *t.notes)),
        )

    # -- inside -----------------------------------------------------------------------------------------

    def _ages(self) -> list[tuple[str, float, str]]:
        """How long a tree lives; nothing where none outlives its round."""
        ages = self.trace.ages
        if not ages:
            return []
        unit = "verdicts since it began"
        return [("age of the tree at a verdict, mean", fmean(ages), unit), ("oldest tree", max(ages), unit)]

    def _windows(self) -> Iterator[tuple[float, float]]:
        """From verdict to verdict, ``rounds`` at a time; a record without rounds in one piece."""
        ends = [r.verdict for r in self.trace.rounds]
        start = 0.0
        for i in range(self.rounds - 1, len(ends), self.rounds):
            yield start, ends[i]
            start = ends[i]
        if start < self.trace.wall and (not ends or ends[-1] > start):
            yield start, self.trace.wall

    def _frame(self, start: float, end: float) -> Frame:
        boxes: list[Box] = []
        for span in self.trace.spans:
            boxes += self._box(span, start, end)
        for side in ("target", "draft"):
            for a, b in self.trace.waits(side):  # type: ignore[arg-type]
                boxes += _cut(_ON[side], a, b, "wait", f"{side} waits {1e3 * (b - a):.3g} ms", start, end)
        thin = (end - start) * _THIN
        for sent in self.trace.sent:
            words = f"{sent.what} to the {'drafter' if sent.to == 'draft' else 'target'}"
            if sent.end > sent.start:
                words += f", {1e3 * (sent.end - sent.start):.3g} ms on its way"
            boxes += _cut(2, sent.start, max(sent.end, sent.start + thin), "sent", words, start, end)
        began = start
        numbers = range(1, len(self.trace.rounds) + 1)
        for number, r in zip(numbers, self.trace.rounds, strict=True):
            if start < r.verdict <= end:
                boxes += self._verdict(number, r, began, start)
                began = r.verdict
        told = [n for n, r in zip(numbers, self.trace.rounds, strict=True) if start < r.verdict <= end]
        words = f"rounds {told[0]} to {told[-1]}" if told else "no round"
        return Frame(f"{words}, from {1e3 * start:.4g} ms on", tuple(boxes))

    def _box(self, span: Span, start: float, end: float) -> list[Box]:
        lasted = 1e3 * (span.end - span.start)
        who = "target" if span.side == "target" else "drafter"
        words = f"{who}: {_NAMES[span.work]}, {span.rows} rows, {lasted:.3g} ms"
        words += f", {span.nodes} nodes made" if span.nodes else ""
        kind = "plain" if span.work == "prompt" else span.work
        return _cut(_ON[span.side], span.start, span.end, kind, words, start, end)

    def _verdict(self, number: int, r: Round, began: float, start: float) -> list[Box]:
        words = f"round {number}: {r.accepted} of {r.drafted} kept, {r.emitted} tokens"
        if r.hit is not None:
            words += ", foreseen" if r.hit else ", not foreseen"
        if r.age is not None:
            words += f"; tree of age {r.age}"
        kind = "hit" if r.hit else "miss"
        a, b = 1e3 * (began - start), 1e3 * (r.verdict - start)
        return [Box(3, a, b, kind, str(r.emitted), words)] if r.hit is not None else []


def _cut(lane: int, a: float, b: float, kind: str, words: str, start: float, end: float) -> list[Box]:
    """A box in ms from ``start``, as far as it lies in the picture."""
    a, b = max(a, start), min(b, end)
    return [Box(lane, 1e3 * (a - start), 1e3 * (b - start), kind, "", words)] if b > a else []


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
