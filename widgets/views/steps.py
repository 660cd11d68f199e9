"""Where is the time? Milliseconds per phase for every engine step, and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.spec.run import Run
from workbench.widgets import clean, figures
from workbench.widgets.palette import PHASES, Theme
from workbench.widgets.table import Table

MAX_STEPS = 2000  # bars; a longer run shows its last steps and says so


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Stacked bars per engine step."""
    steps = runs[-1].steps[-MAX_STEPS:]
    cut = len(runs[-1].steps) - len(steps)
    note = f"last {MAX_STEPS} steps of {cut + MAX_STEPS}" if cut else ""
    out = figures.new("Time per engine step", theme=theme, x="engine step", y="ms", note=note)
    out.update_layout(barmode="stack", bargap=0.1)
    for key, name, colour in PHASES:
        values, left_out = clean.series([s.get("phase_ms", {}).get(key, 0.0) for s in steps])
        if any(values):
            out.add_bar(
                x=[s.get("step") for s in steps], y=values, name=name, marker={"color": colour},
                customdata=[s.get("rows") for s in steps],
                hovertemplate=f"{name}: %{{y:.3g}} ms, %{{customdata}} rows<extra></extra>",
            )  # fmt: skip
        if left_out:
            figures.add_note(out, clean.note(left_out))
    return out


def table(runs: Sequence[Run]) -> Table:
    """Total and share per phase."""
    steps = runs[-1].steps
    sums = {k: sum(s.get("phase_ms", {}).get(k, 0.0) for s in steps) for k, _, _ in PHASES}
    total = sum(sums.values())
    rows = [
        (name, sums[key], sums[key] / max(len(steps), 1), f"{sums[key] / total:.1%}" if total else "–")
        for key, name, _ in PHASES
    ]
    rows.append(("all", total, total / max(len(steps), 1), "100.0%" if total else "–"))
    return Table.of(
        ("phase", "total ms", "ms per step", "share"), rows, note=f"Measured over {len(steps)} steps."
    )
