"""Where is the memory? KV bytes by category over the steps of a run, and every category at its fullest step.

Weights are in the table and the title only: on a small model they would flatten everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.spec.run import Run
from workbench.widgets import clean, figures, words
from workbench.widgets.palette import MEMORY, Theme
from workbench.widgets.table import Table

DRAWN = ("kv_payload", "kv_meta", "fragmentation", "draft", "workspace", "kv_cold")
_MIB = 1024 * 1024


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """Stacked area over engine steps, in MiB."""
    run = runs[-1]
    steps = run.steps
    out = figures.new(
        f"Memory in use beside {words.size(run.memory.get('weights', 0))} of weights",
        theme=theme, x="engine step", y="MiB",
    )  # fmt: skip
    left_out = 0
    for key, name, colour in MEMORY:
        if key not in DRAWN:
            continue
        values, missing = clean.series([s.get("bytes", {}).get(key, 0) / _MIB for s in steps])
        left_out += missing
        if any(values):
            out.add_scatter(
                x=[s.get("step") for s in steps], y=values, name=name, stackgroup="kv", mode="lines",
                line={"color": colour, "width": 1, "shape": "hv"},
                hovertemplate=f"{name}: %{{y:.3g}} MiB<extra></extra>",
            )  # fmt: skip
    if left_out:
        figures.add_note(out, clean.note(left_out))
    return out


def table(runs: Sequence[Run]) -> Table:
    """Bytes by category at the fullest step, one column per run."""
    shown = [(k, n) for k, n, _ in MEMORY if any(r.memory.get(k) for r in runs)]
    rows = [(name, *(words.size(r.memory.get(key, 0)) for r in runs)) for key, name in shown]
    rows.append(("KV in use", *(words.size(words.kv_in_use(r.memory)) for r in runs)))
    labels = [label(r) for r in runs]
    return Table.of(("category", *labels), rows, note="Measured: storages held at the fullest step.")


def label(run: Run) -> str:
    """A run's recipe in a few words."""
    return " + ".join(str(u.get("id")) for u in run.recipe) or "plain"
