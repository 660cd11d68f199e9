"""Where did each token come from? Tokens of a run by source, over its positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.spec.run import Run
from workbench.widgets import clean, figures
from workbench.widgets.palette import SOURCES, Theme
from workbench.widgets.table import Table

_SYMBOLS = {"plain": "circle", "accepted": "square", "bonus": "diamond", "corrected": "x"}


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """One mark per token: engine step over position; a column of marks is one accepted block."""
    tokens = _tokens(runs[-1])
    out = figures.new("Tokens by source", theme=theme, x="token", y="engine step")
    first = min((t["step"] for t in tokens), default=0)
    for source, colour in SOURCES.items():
        mine = [(i, t) for i, t in enumerate(tokens, 1) if t["source"] == source]
        if mine:
            scores, _ = clean.series([t.get("logprob") for _, t in mine])
            out.add_scatter(
                x=[i for i, _ in mine], y=[t["step"] - first + 1 for _, t in mine],
                mode="markers", name=source,
                marker={"color": colour, "symbol": _SYMBOLS[source], "size": 7}, customdata=scores,
                hovertemplate=source + ", step %{y}, log-probability %{customdata:.3g}<extra></extra>",
            )  # fmt: skip
    return out


def table(runs: Sequence[Run]) -> Table:
    """Count and share per source."""
    tokens = _tokens(runs[-1])
    counts = {s: sum(t["source"] == s for t in tokens) for s in SOURCES}
    rows = [(s, n, f"{n / len(tokens):.0%}") for s, n in counts.items() if n]
    return Table.of(
        ("source", "tokens", "share"), rows, note=f"{len(tokens)} tokens of the first output (measured)."
    )


def _tokens(run: Run) -> list[dict[str, Any]]:
    return list(run.outputs[0].get("tokens", [])) if run.outputs else []
