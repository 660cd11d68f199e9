"""``workbench bench kv_bars``: what each KV technique must reach, and what must fail without a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.cli.generate import keep
from workbench.cli.output import note, out, print_json
from workbench.cli.tasks import SMALL_POOL, working
from workbench.spec.errors import OptionError

KV_BARS = "kv_bars"
_SIZES = ("context", "score", "windows")


def kv_bars(
    model: str,
    only: tuple[str, ...],
    sizes: Mapping[str, int],
    where: Mapping[str, Any],
    save: bool,
    json: bool,
) -> None:
    """Measure and print the table; points that are known are not measured again."""
    unknown = [s for s in sizes if s not in _SIZES]
    if unknown:
        raise OptionError(f"{KV_BARS} has no size {unknown[0]!r}.", hint=f"Sizes are {', '.join(_SIZES)}.")
    from workbench.core.kv_bars import bar_methods, bars_run, rows_of, submit_bars
    from workbench.core.kv_points import Points
    from workbench.core.quality_windows import QualitySettings

    settings = QualitySettings(greedy=0, **sizes)
    bar_methods(only)  # every name is checked before the model is opened
    with working(KV_BARS, model, limits=SMALL_POOL, **where) as (session, wait):
        found = wait(submit_bars(session, settings, only=only, points=Points()))
        run = bars_run(session, settings, found)
    saved, trouble = keep(run) if save else (False, "")
    if json:
        print_json({**run.to_dict(), "saved": saved})
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("technique", "codec ×", "KL", "ΔPPL %", "bar", ""):
            table.add_column(name, justify="right" if name in ("codec ×", "KL", "ΔPPL %") else "left")
        for row in rows_of(found):
            codec = f"{row.codec:.2f}" if row.codec is not None else "–"
            met = Text("met" if row.met else "MISSED", style="" if row.met else "bold")
            table.add_row(
                Text(row.technique), codec, f"{row.kl:.4f}", f"{row.change:+.2f}", Text(row.bar), met
            )
        console = out()
        console.print(table)
        p = run.provenance
        console.print(
            f"· {run.model} · {run.dtype} · {settings.windows} windows of {settings.context} + "
            f"{settings.score} tokens at most · measured{f' on {p.cpu}' if p else ''}",
            markup=False,
        )
        for line in run.notes:
            console.print(f"· {line}", markup=False)
    if trouble:
        note(f"note: {trouble}" if saved else f"note: the run was not saved: {trouble}")
