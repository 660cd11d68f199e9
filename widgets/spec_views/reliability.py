"""Is a drafter as sure as it may be? Share of nodes that were accepted, by the confidence of their path.

Bars are measured, with the 95% interval of a share of so few nodes; the dashes are what the drafter gave the
nodes of a bar on average. Under R3, which takes a node by the model's own chance of it, both should agree; a
dynamic tree is grown by these numbers. Definitions: ``workbench.speculative.paths``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from workbench.spec.events import DraftRecord
from workbench.spec.run import Run
from workbench.speculative.paths import Bin, foreseen, reliability
from workbench.widgets import figures
from workbench.widgets.palette import INKS, SOURCES, Theme
from workbench.widgets.spec_views.badge import judged_by
from workbench.widgets.spec_views.stored import steps_of
from workbench.widgets.table import Table

_Z = 1.96  # standard errors to each side of 95%


class Reliability:
    """Of a run's drafts, those whose drafter gave chances."""

    def __init__(self, run: Run) -> None:
        drafts = [d for s in steps_of(run) for d in s.drafts]
        self.records: list[DraftRecord] = [d for d in drafts if d.chances]
        self.silent = len(drafts) - len(self.records)

    @cached_property
    def bins(self) -> tuple[Bin, ...]:
        """All bins, empty ones too."""
        return reliability(self.records)

    @property
    def title(self) -> str:
        """Tokens that the paths of a round promise, beside those that were kept of it."""
        n = len(self.records)
        if not n:
            return "Nothing was drafted with a confidence"
        said, kept = sum(map(foreseen, self.records)) / n, sum(len(r.accepted) for r in self.records) / n
        judged = judged_by(self.records)
        return f"Reliability: accepted a round {said:.2f} predicted, {kept:.2f} measured, {judged}"

    @property
    def note(self) -> str:
        """What the numbers are of, and whether both should agree."""
        said = [f"{len(self.records)} rounds; in brackets: 95% of a share of so many."]
        if {r.rule for r in self.records} - {"r3"}:
            said.append("Only under r3 should confidence and share agree.")
        if self.silent:
            said.append(f"{self.silent} {'draft tells' if self.silent == 1 else 'drafts tell'} no chances.")
        return " ".join(said)

    def figure(self, theme: Theme = "auto") -> Any:
        """A bar for every bin with nodes; their number stands below it."""
        bins = [b for b in self.bins if b.nodes]
        out = figures.new(
            self.title, theme=theme,
            x="confidence of the path (drafter's chances, multiplied)", y="share of nodes accepted",
        )  # fmt: skip
        x = [f"{_edges(b)}<br>n {b.nodes:,}" for b in bins]
        spread = [_interval(b) for b in bins]
        out.add_bar(
            x=x, y=[b.share for b in bins], name="accepted (measured)", marker={"color": SOURCES["accepted"]},
            error_y={
                "type": "data", "symmetric": False, "color": INKS[theme]["text"], "thickness": 1, "width": 3,
                "array": [high - (b.share or 0) for b, (_, high) in zip(bins, spread, strict=True)],
                "arrayminus": [(b.share or 0) - low for b, (low, _) in zip(bins, spread, strict=True)],
            },
            customdata=[(b.accepted, b.nodes) for b in bins],
            hovertemplate="%{customdata[0]} of %{customdata[1]} nodes accepted: %{y:.1%}<extra></extra>",
        )  # fmt: skip
        out.add_scatter(
            x=x, y=[b.foreseen for b in bins], mode="lines+markers", name="mean confidence (predicted)",
            line=figures.line("predicted", SOURCES["corrected"], 1.5),
            marker={
                "symbol": "diamond-open", "size": 9, "color": SOURCES["corrected"], "line": {"width": 2},
            },
            hovertemplate="the drafter gave %{y:.1%}<extra></extra>",
        )  # fmt: skip
        out.update_xaxes(type="category")
        out.update_yaxes(range=[0, 1.04], tickformat=".0%")
        out.update_layout(height=380, bargap=0.25, margin={"t": 72, "b": 64})
        return out

    def table(self) -> Table:
        """A row for every bin."""
        rows = []
        for b in self.bins:
            low, high = _interval(b)
            share = f"{b.share:.1%} ({low:.1%}–{high:.1%})" if b.share is not None else "–"
            promised = f"{b.foreseen:.1%}" if b.foreseen is not None else "–"
            rows.append((_edges(b), b.nodes, promised, b.accepted, share, "measured"))
        columns = ("path confidence", "nodes", "mean (predicted)", "accepted", "share accepted", "tag")
        return Table.of(columns, rows, note=f"{self.title}. {self.note}")


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Of the last run."""
    return Reliability(runs[-1]).figure(theme)


def table(runs: Sequence[Run]) -> Table:
    """The same in numbers."""
    return Reliability(runs[-1]).table()


def _edges(b: Bin) -> str:
    return f"{b.low:g}–{b.high:g}"


def _interval(b: Bin) -> tuple[float, float]:
    """Wilson's interval of the share accepted; everything without nodes."""
    if b.share is None:
        return 0.0, 1.0
    n, z = b.nodes, _Z**2
    middle = (b.share + z / (2 * n)) / (1 + z / n)
    half = _Z / (1 + z / n) * (b.share * (1 - b.share) / n + z / (4 * n * n)) ** 0.5
    return max(0.0, min(middle - half, b.share)), min(1.0, max(middle + half, b.share))
