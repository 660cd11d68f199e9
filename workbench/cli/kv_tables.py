"""KV methods as a table for a terminal or as JSON, a row per method, and into the run store if wanted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from workbench.cli.generate import keep
from workbench.cli.output import note, out, print_json, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from workbench.spec.run import Metric, Run

# Column, metric, form of its value.
_COLUMNS = (
    ("recall %", "needle_recall", "{:.0f}"),
    ("plain %", "needle_recall_plain", "{:.0f}"),
    ("margin", "needle_margin", "{:.2f}"),
    ("low … high", "needle_margin", "spread"),
    ("codec ×", "codec_ratio", "{:.2f}"),
    ("whole ×", "whole_ratio", "{:.2f}"),
    ("KL", "kl", "{:.4f}"),
    ("low … high", "kl", "spread"),
    ("top-1 %", "top1", "{:.1f}"),
    ("ΔPPL %", "perplexity_change", "{:+.2f}"),
    ("encode MB/s", "encode_rate", "{:.3g}"),
    ("decode MB/s", "decode_rate", "{:.3g}"),
    ("artefact", "artefact", "B"),
    ("% of model", "artefact_share", "{:.2f}"),
    ("pays after", "break_even", "{:.0f} tok"),
)
_WIDEST = 1000
"""Characters of a line that no terminal folds, at most."""


def show_methods(runs: Sequence[Run], save: bool, json: bool, **more: Any) -> None:
    """The runs of methods as one JSON object, or as one table; ``more`` joins the object."""
    kept = []
    for run in runs:
        saved, trouble = keep(run) if save else (False, "")
        kept.append(saved)
        if trouble:
            note(f"note: {trouble}" if saved else f"note: the run was not saved: {trouble}")
    if json:
        rows = [{**_data(r), "saved": s} for r, s in zip(runs, kept, strict=True)]
        print_json({**more, "state": "done", "runs": rows})
        return
    print_methods(runs)


def print_methods(runs: Sequence[Run]) -> None:
    """One row per method: what is measured of it, and how far windows lie apart."""
    from rich.table import Table
    from rich.text import Text

    shown = [c for c in _COLUMNS if any(r.metric(c[1]) for r in runs)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("method", *(c[0] for c in shown)):
        method = name == "method"
        table.add_column(
            name, justify="left" if method else "right", overflow="fold" if method else "ellipsis"
        )
    for run in runs:
        cells = [_cell(run.metric(metric), form) for _, metric, form in shown]
        table.add_row(*(Text(c) for c in (run.subject, *cells)))
    console = out()
    print_wide(console, table)
    if runs:
        first = runs[0]
        shared = first.metric("kl") or first.metric("needle_recall")
        what = "windows" if first.metric("kl") else "needles"
        console.print(
            f"· {first.model} · {first.dtype} · measured; {shared.n if shared else 0} {what}, "
            "low … high: their range; ratios to 16-bit KV",
            markup=False,
        )
        for line in dict.fromkeys(n for r in runs for n in r.notes):
            console.print(f"· {line}", markup=False)
        if first.provenance is not None:
            p = first.provenance
            console.print(
                f"· {p.cpu or p.platform} · {p.device} · {p.threads} threads · MB/s of 16-bit KV",
                markup=False,
            )


def print_wide(console: Console, table: Table) -> None:
    """A table as wide as the terminal; off a terminal, in a file or a pipe, as wide as it is."""
    before = console.width
    if not sys.stdout.isatty():
        from rich.measure import Measurement

        options = console.options.update(max_width=_WIDEST)
        console.width = max(before, Measurement.get(console, options, table).maximum)
    console.print(table)
    console.width = before


def _cell(metric: Metric | None, form: str) -> str:
    if metric is None:
        return "–"
    if form == "B":
        return size(metric.value)
    if form == "spread":
        return "{:.3g} … {:.3g}".format(*metric.spread) if metric.spread and metric.n > 1 else "–"
    return form.format(metric.value)


def _data(run: Run) -> dict[str, Any]:
    data = run.to_dict()
    data.pop("steps")
    return data
