"""How much of the draft is kept? Share of steps that accepted each draft position, and τ.

Bars: survival, the share of drafts of which a position was kept. Open marks: conditional, the same share of
those that kept the position before. Definitions: ``workbench.speculative.stats``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.spec.run import Run
from workbench.spec.technique import Kind
from workbench.widgets import clean, figures, words
from workbench.widgets.palette import INKS, SOURCES, Theme
from workbench.widgets.spec_views.badge import badge
from workbench.widgets.table import Table


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Bars by draft position; an empty plot that says so when nothing was drafted."""
    return drawn(runs[-1].acceptance, theme)


def drawn(a: Mapping[str, Any], theme: Theme = "auto", of: str = "") -> Any:
    """The same of one ``Run.acceptance``; ``of`` says whose it is."""
    survival, left_out = clean.series(a.get("survival", ()))
    conditional, _ = clean.series(a.get("conditional", ()))
    title = (
        f"Acceptance{of}: τ {words.number(a.get('tau'))} tokens per verified draft, {badge(kind(a))}"
        if a
        else "Nothing was drafted"
    )
    note = clean.note(left_out)
    out = figures.new(title, theme=theme, x="draft position", y="share accepted", note=note)
    out.add_bar(
        x=list(range(1, len(survival) + 1)), y=survival, name="of all drafts",
        marker={"color": SOURCES["accepted"]},
        hovertemplate="position %{x}: %{y:.1%} of drafts<extra></extra>",
    )  # fmt: skip
    if conditional:
        out.add_scatter(
            x=list(range(1, len(conditional) + 1)), y=conditional, mode="lines+markers",
            name="of those that kept the one before",
            marker={"color": SOURCES["corrected"], "symbol": "diamond-open", "size": 9, "line": {"width": 2}},
            line={"color": INKS[theme]["axis"], "width": 1},
            hovertemplate="position %{x}: %{y:.1%} given the one before<extra></extra>",
        )  # fmt: skip
    out.update_yaxes(range=[0, 1.04], tickformat=".0%")
    out.update_xaxes(dtick=1 if len(survival) <= 16 else 4)
    out.update_layout(margin={"t": 72})
    return out


def kind(a: Mapping[str, Any]) -> Kind:
    """Exact, or lossy where the verdicts told a mismatch."""
    return "lossy" if a.get("mismatch") is not None else "exact"


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
        f"{a.get('drafted')} drafted tokens accepted, {a.get('steps')} drafts, {badge(kind(a))} (measured)."
        if a
        else "Nothing was drafted: switch on a drafter."
    )
    return Table.of(("position", "accepted", "share of drafts", "given the one before"), rows, note=note)
