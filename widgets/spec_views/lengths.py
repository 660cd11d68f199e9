"""How many drafted tokens does a round keep? A histogram of rounds by accepted tokens.

A bar has two parts: rounds whose whole draft was kept, which a longer draft might have made longer, and
rounds that ended at a rejection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.spec.run import Run
from workbench.widgets import figures, words
from workbench.widgets.palette import SOURCES, Theme
from workbench.widgets.spec_views.badge import badge
from workbench.widgets.table import Table
from workbench.widgets.views.acceptance import kind


def counts(a: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Rounds that accepted 0, 1, … tokens: those that ended at a rejection, and those kept whole."""
    histogram = {int(depth): list(row) for depth, row in (a.get("histogram") or {}).items()}
    most = max(histogram, default=-1)
    rejected, whole = [0] * (most + 1), [0] * (most + 1)
    for depth, row in histogram.items():
        for n, rounds in enumerate(row):
            (whole if n == depth else rejected)[n] += rounds
    return rejected, whole


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Stacked bars by accepted tokens; an empty plot that says so when nothing was drafted."""
    a = runs[-1].acceptance
    rejected, whole = counts(a)
    title = (
        f"Accepted length: τ {words.number(a.get('tau'))}, {badge(kind(a))}" if a else "Nothing was drafted"
    )
    out = figures.new(title, theme=theme, x="accepted tokens of a round", y="rounds")
    x = list(range(len(whole)))
    out.add_bar(
        x=x, y=whole, name="the whole draft", marker={"color": SOURCES["accepted"]},
        hovertemplate="%{x} accepted, nothing rejected: %{y} rounds<extra></extra>",
    )  # fmt: skip
    out.add_bar(
        x=x, y=rejected, name="up to a rejection",
        marker={
            "color": SOURCES["corrected"],
            "pattern": {"shape": "/", "size": 6, "solidity": 0.3, "fgcolor": "rgba(255,255,255,0.8)"},
        },
        hovertemplate="%{x} accepted, then one rejected: %{y} rounds<extra></extra>",
    )  # fmt: skip
    out.update_layout(barmode="stack", bargap=0.15)
    out.update_xaxes(dtick=1 if len(x) <= 17 else 4)
    return out


def table(runs: Sequence[Run]) -> Table:
    """One row per length."""
    a = runs[-1].acceptance
    rejected, whole = counts(a)
    total = sum(rejected) + sum(whole)
    rows = [
        (n, r + w, f"{(r + w) / total:.0%}", w, r)
        for n, (r, w) in enumerate(zip(rejected, whole, strict=True))
        if r + w or n == 0
    ]
    note = f"{total} rounds (measured)." if a else "Nothing was drafted: switch on a drafter."
    columns = ("accepted tokens", "rounds", "share", "the whole draft", "up to a rejection")
    return Table.of(columns, rows if a else (), note=note)
