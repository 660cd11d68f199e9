"""What does a round cost? Milliseconds of every round for drafting, verification and all else.

Verification is the target's forward and the verdict; overhead is what the host does around it. The dashed
line is a plain step of the same run or of the one pinned before it, where there was any: a round that keeps
n tokens pays if it is shorter than n + 1 of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from workbench.spec.events import PHASES, StepEvent
from workbench.spec.run import Run
from workbench.widgets import clean, figures
from workbench.widgets.palette import INKS, Theme
from workbench.widgets.spec_views.stored import Source, steps_of
from workbench.widgets.table import Table

# part, its phases, colour, hatching
PARTS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("draft", ("draft",), "#12908e", "/"),
    ("verification", ("forward", "verify"), "#2f7fd1", ""),
    ("overhead", tuple(p for p in PHASES if p not in ("draft", "forward", "verify")), "#9aa3ad", "."),
)
MOST = 400  # rounds drawn, the latest


@dataclass(frozen=True)
class RoundTime:
    """One decode step: its parts in ms, drafted and emitted tokens (of all sequences in it)."""

    step: int
    parts: Mapping[str, float]
    drafted: int
    emitted: int

    @property
    def total(self) -> float:
        """All of it, in ms."""
        return sum(self.parts.values())


def round_times(source: Source) -> list[RoundTime]:
    """Decode steps of a run or of events, with drafts or without; steps that read prompts are left out."""
    return [_time(s) for s in steps_of(source) if s.decode and not s.prefill]


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Stacked bars of the last run's rounds; the plain step of it, or of the run before."""
    times = round_times(runs[-1])
    shown = times[-MOST:]
    cut = len(times) - len(shown)
    note = f"last {MOST} rounds of {len(times)}" if cut else ""
    out = figures.new("Time per round (measured)", theme=theme, x="decode step of the run", y="ms", note=note)
    x = list(range(cut + 1, len(times) + 1))
    for name, _, colour, hatch in PARTS:
        values, _ = clean.series([t.parts[name] for t in shown])
        out.add_bar(
            x=x, y=values, name=name,
            marker={
                "color": colour,
                "pattern": {"shape": hatch, "size": 5, "solidity": 0.3, "fgcolor": "rgba(255,255,255,0.7)"},
            },
            customdata=[(t.drafted, t.emitted) for t in shown],
            hovertemplate=f"{name}: %{{y:.3g}} ms; %{{customdata[0]}} drafted, %{{customdata[1]}} gained"
            "<extra></extra>",
        )  # fmt: skip
    plain = _plain(runs)
    if plain is not None and x:
        out.add_scatter(
            x=[x[0] - 0.5, x[-1] + 0.5], y=[plain, plain], mode="lines", name=f"a plain step, {plain:.3g} ms",
            line={"color": INKS[theme]["text"], "width": 1.5, "dash": "dash"}, hoverinfo="skip",
        )  # fmt: skip
    out.update_layout(barmode="stack", bargap=0.1)
    return out


def table(runs: Sequence[Run]) -> Table:
    """Parts of drafted rounds and of plain steps, and what a token cost in each."""
    times = round_times(runs[-1])
    rows = []
    for name, drafted in (("rounds with a draft", True), ("steps without", False)):
        found = [t for t in times if (t.drafted > 0) == drafted]
        if found:
            parts = [median([t.parts[part] for t in found]) for part, *_ in PARTS]
            gained = sum(t.emitted for t in found)
            each = sum(t.total for t in found) / gained if gained else None
            rows.append((name, len(found), *parts, mean(t.emitted for t in found), each, "measured"))
    columns = ("", "n", *(f"{part}, ms" for part, *_ in PARTS), "tokens each", "ms a token", "tag")
    return Table.of(columns, rows, note="Medians; ms a token: all time over all tokens.")


def _time(step: StepEvent) -> RoundTime:
    parts = {name: sum(step.phase_ms.get(p, 0.0) for p in phases) for name, phases, *_ in PARTS}
    plain = step.decode - len(step.drafts)
    return RoundTime(step.step, parts, step.draft, sum(d.emitted for d in step.drafts) + plain)


def _plain(runs: Sequence[Run]) -> float | None:
    for run in reversed(runs):
        times = [t.total for t in round_times(run) if not t.drafted]
        if len(times) > 2:
            return median(times)
    return None
