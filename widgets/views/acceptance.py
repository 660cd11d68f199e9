"""How much of the draft is kept? Share of steps that accepted each draft position, and τ.

Definitions: ``workbench.speculative.stats``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.spec.run import Run
from workbench.widgets import clean, figures, words
from workbench.widgets.palette import SOURCES, Theme
from workbench.widgets.table import Table


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Bars by draft position; an empty plot that says so when nothing was drafted."""
    a = runs[-1].acceptance
    survival, left_out = clean.series(a.get("survival", ()))
    title = (
        f"Acceptance: τ {words.number(a.get('tau'))} tokens per verified draft"
        if a
        else "Nothing was drafted"
    )
    note = clean.note(left_out)
    out = figures.new(title, theme=theme, x="draft position", y="share of drafts accepted", note=note)
    out.add_bar(
        x=list(range(1, len(survival) + 1)), y=survival, name="accepted",
        marker={"color": SOURCES["accepted"]},
        hovertemplate="position %{x}: %{y:.1%}<extra></extra>",
    )  # fmt: skip
    out.update_yaxes(range=[0, 1], tickformat=".0%")
    out.update_xaxes(dtick=1)
    return out


def table(runs: Sequence[Run]) -> Table:
    """One row per draft position."""
    a = runs[-1].acceptance
    conditional = list(a.get("conditional", ()))
    survivors = list(a.get("survivors", ()))
    last = next((i for i, n in enumerate(survivors) if not n), len(survivors)) + 1  # zeros follow a zero
    rows = [
        (i + 1, n, s, conditional[i] if i < len(conditional) else None)
        for i, (n, s) in enumerate(zip(survivors[:last], a.get("survival", ()), strict=False))
    ]
    note = (
        f"τ {words.number(a.get('tau'))} tokens per verified draft, {a.get('accepted')} of "
        f"{a.get('drafted')} drafted tokens accepted, {a.get('steps')} drafts (measured)."
        if a
        else "Nothing was drafted: switch on a drafter."
    )
    return Table.of(("position", "accepted", "share of drafts", "given the one before"), rows, note=note)
