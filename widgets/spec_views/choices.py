"""What do second choices add? Accepted tokens by depth: a node's likeliest child, or one tried behind it.

A chain has first choices only. In a tree, a round goes on where the first was wrong and another child was
right; FastEagle's other children are leaves, so a round ends with one. What a part adds to the accepted
tokens of a round is its bars added up. Definitions: ``workbench.speculative.paths``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from workbench.spec.events import DraftRecord
from workbench.spec.run import Run
from workbench.speculative.paths import Choices, kept_choices
from workbench.widgets import figures
from workbench.widgets.palette import SOURCES, B, Theme
from workbench.widgets.spec_views.badge import judged_by
from workbench.widgets.spec_views.stored import steps_of
from workbench.widgets.table import Table


class KeptChoices:
    """Of all drafts of a run."""

    def __init__(self, run: Run) -> None:
        self.records: list[DraftRecord] = [d for s in steps_of(run) for d in s.drafts]

    @cached_property
    def depths(self) -> tuple[Choices, ...]:
        """By depth, up to the first at which nothing was kept."""
        every = kept_choices(self.records)
        last = next((i for i, c in enumerate(every) if not c.first + c.side), len(every))
        return every[: last + 1]

    @property
    def title(self) -> str:
        """Accepted tokens a round, in two parts."""
        if not self.records:
            return "Nothing was drafted"
        n = len(self.records)
        first, side = sum(c.first for c in self.depths) / n, sum(c.side for c in self.depths) / n
        judged = judged_by(self.records)
        return f"Accepted a round: {first:.2f} by first choices, {side:.2f} by others, {judged} (measured)"

    def figure(self, theme: Theme = "auto") -> Any:
        """Stacked bars by depth."""
        out = figures.new(self.title, theme=theme, x="depth", y="accepted a round")
        n, x = len(self.records), [c.depth for c in self.depths]
        for name, values, colour, hatch in (
            ("a node's first child", [c.first for c in self.depths], SOURCES["accepted"], ""),
            ("another child", [c.side for c in self.depths], B, "/"),
        ):
            out.add_bar(
                x=x, y=[v / n for v in values], name=name, customdata=values,
                marker={"color": colour, "pattern": {"shape": hatch, "size": 6, "solidity": 0.3}},
                hovertemplate=f"depth %{{x}}, {name}: %{{y:.1%}} of rounds (%{{customdata}})<extra></extra>",
            )  # fmt: skip
        out.update_layout(barmode="stack", bargap=0.2, margin={"t": 72})
        out.update_xaxes(dtick=1 if len(x) <= 16 else 4)
        out.update_yaxes(rangemode="tozero")
        return out

    def table(self) -> Table:
        """A row for every depth."""
        n = len(self.records)
        rows = [
            (c.depth, c.first, f"{c.first / n:.1%}", c.side, f"{c.side / n:.1%}", "measured")
            for c in self.depths
        ]
        columns = ("depth", "first choices kept", "of rounds", "others kept", "others, of rounds", "tag")
        return Table.of(columns, rows, note=f"{self.title}; {n} rounds.")


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Of the last run."""
    return KeptChoices(runs[-1]).figure(theme)


def table(runs: Sequence[Run]) -> Table:
    """The same in numbers."""
    return KeptChoices(runs[-1]).table()
