"""Behind which layer was each round drafted, and how far? The choices of a control, round by round.

A mark per round at its exit layer, as large as its draft is long; what was kept stands beside what was
drafted in the table, by exit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workbench.spec.errors import RecordError
from workbench.spec.events import DraftRecord
from workbench.widgets import figures
from workbench.widgets.palette import SOURCES, Theme
from workbench.widgets.spec_views.badge import badge, kind_of
from workbench.widgets.spec_views.stored import Source, steps_of
from workbench.widgets.table import Table


@dataclass(frozen=True)
class ExitChoices:
    """Records of the rounds that the model's own first layers drafted, in order."""

    records: tuple[DraftRecord, ...]

    def __post_init__(self) -> None:
        if not self.records:
            raise RecordError(
                "No round was drafted by the model's own layers.",
                hint="Switch on LayerSkip and run a prompt.",
            )

    @property
    def title(self) -> str:
        """What is drawn, and whether its rule is exact."""
        return f"Exit layer and length of every round, {badge(kind_of(self.records))} (measured)"

    def figure(self, theme: Theme = "auto") -> Any:
        """Exit layer by round: filled where something was kept, open where nothing was."""
        out = figures.new(self.title, theme=theme, x="round", y="exit layer")
        wanted: tuple[tuple[str, str, str, Callable[[DraftRecord], bool]], ...] = (
            ("something kept", "accepted", "circle", lambda r: bool(r.accepted)),
            ("nothing kept", "corrected", "circle-open", lambda r: not r.accepted),
        )
        for name, colour, mark, chosen in wanted:
            rounds = [(i, r) for i, r in enumerate(self.records, 1) if chosen(r)]
            out.add_scatter(
                x=[i for i, _ in rounds], y=[r.exit for _, r in rounds], mode="markers", name=name,
                marker={
                    "symbol": mark, "color": SOURCES[colour], "line": {"width": 2},
                    "size": [6 + 2 * len(r.tokens) for _, r in rounds],
                },
                customdata=[[len(r.tokens), len(r.accepted)] for _, r in rounds],
                hovertemplate="round %{x}: %{customdata[0]} drafted behind layer %{y}, "
                "%{customdata[1]} kept<extra></extra>",
            )  # fmt: skip
        out.update_yaxes(dtick=1, rangemode="tozero")
        out.update_layout(height=320)
        return out

    def table(self) -> Table:
        """A row per exit layer: rounds, drafts, what was kept."""
        rows = []
        for exit in sorted({r.exit for r in self.records}):
            here = [r for r in self.records if r.exit == exit]
            drafted, kept = sum(len(r.tokens) for r in here), sum(len(r.accepted) for r in here)
            share = f"{kept / drafted:.0%}"
            rows.append(
                (exit, len(here), round(drafted / len(here), 2), share, 1 + kept / len(here), "measured")
            )
        columns = ("exit layer", "rounds", "drafts a round", "kept", "tokens a round", "tag")
        return Table.of(columns, rows)


def read_exits(source: Source) -> ExitChoices:
    """The choices of a run (live or stored) or of step events.

    Raises :class:`RecordError` where none was made.
    """
    return ExitChoices(tuple(d for s in steps_of(source) for d in s.drafts if d.exit))
