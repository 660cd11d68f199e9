"""What changed between two runs? The first and the last of ``runs``, number by number.

A ratio is last over first. One pair of runs carries no spread between runs; ``panel.ab`` measures it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from workbench.spec.run import Run
from workbench.widgets import clean, figures, words
from workbench.widgets.palette import B, Theme
from workbench.widgets.table import Table
from workbench.widgets.views.latency import NAMES
from workbench.widgets.views.memory import label


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Ratios on a log axis; a mark right of 1 is larger in the last run."""
    rows = [(name, r) for name, _, _, r in pairs(runs[0], runs[-1])]
    ratios, left_out = clean.series([r for _, r in rows], log=True)
    out = figures.new(
        f"{label(runs[-1])} over {label(runs[0])}",
        theme=theme,
        x="ratio (log)",
        note=clean.note(left_out, log=True),
    )
    out.add_scatter(
        x=ratios, y=[name for name, _ in rows], mode="markers",
        marker=figures.marker("measured", B), showlegend=False,
        hovertemplate="%{y}: %{x:.3g}× of the first<extra></extra>",
    )  # fmt: skip
    out.update_xaxes(type="log")
    out.update_yaxes(autorange="reversed")
    out.add_vline(x=1, line={"color": "#767b85", "width": 1})
    return out


def table(runs: Sequence[Run]) -> Table:
    """Metric, first, last, ratio."""
    first, last = runs[0], runs[-1]
    rows = [
        (name, a, b, f"{ratio:.2f}×" if ratio is not None else "–", "measured")
        for name, a, b, ratio in pairs(first, last)
    ]
    return Table.of(
        ("", f"A: {label(first)}", f"B: {label(last)}", "B / A", "tag"), rows, note=words.delta(first, last)
    )


def pairs(first: Run, last: Run) -> Iterator[tuple[str, str, str, float | None]]:
    """(name, first in words, last in words, ratio) of everything both runs measured."""
    for name, title in NAMES.items():
        a, b = first.metric(name), last.metric(name)
        if a is not None and b is not None:
            yield title, words.describe(a), words.describe(b), _ratio(a.value, b.value)
    a_kv, b_kv = words.kv_in_use(first.memory), words.kv_in_use(last.memory)
    if a_kv and b_kv:
        yield "KV in use", words.size(a_kv), words.size(b_kv), _ratio(a_kv, b_kv)
    tau_a, tau_b = first.acceptance.get("tau"), last.acceptance.get("tau")
    if tau_a or tau_b:
        yield "τ (tokens per draft)", words.number(tau_a), words.number(tau_b), _ratio(tau_a or 0, tau_b or 0)


def _ratio(a: float, b: float) -> float | None:
    return b / a if a else None
