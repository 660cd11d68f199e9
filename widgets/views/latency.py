"""How long until the next token? Time per step of a run, and the latency metrics with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.spec.run import Run
from workbench.widgets import clean, figures, words
from workbench.widgets.palette import A, B, Theme
from workbench.widgets.table import Table
from workbench.widgets.views.memory import label

NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between deliveries",
    "decode_speed": "decode speed",
    "overhead": "host overhead",
}


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Milliseconds of each engine step after the first, for the first and the last of ``runs``."""
    out = figures.new("Time per step", theme=theme, x="step of the run", y="ms")
    shown = [(runs[0], A), (runs[-1], B)] if len(runs) > 1 else [(runs[-1], B)]
    left_out = 0
    for run, colour in shown:
        values, missing = clean.series([sum(s.get("phase_ms", {}).values()) for s in run.steps])
        left_out += missing
        out.add_scatter(
            x=list(range(1, len(values) + 1)), y=values, mode="lines", name=label(run),
            line=figures.line("measured", colour), connectgaps=False,
            hovertemplate="step %{x}: %{y:.3g} ms<extra></extra>",
        )  # fmt: skip
    out.update_yaxes(rangemode="tozero")
    if left_out:
        figures.add_note(out, clean.note(left_out))
    return out


def table(runs: Sequence[Run]) -> Table:
    """TTFT, TPOT, ITL, speed and overhead, each with unit, spread and tag."""
    rows = []
    for run in runs:
        for name, title in NAMES.items():
            metric = run.metric(name)
            if metric is not None:
                rows.append((label(run), title, words.describe(metric), metric.n, metric.tag))
    return Table.of(("recipe", "metric", "value", "n", "tag"), rows)
