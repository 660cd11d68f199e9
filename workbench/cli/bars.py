"""``workbench bench kv_bars`` and ``kv_domains``: what KV techniques must reach, and on which text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workbench.cli.generate import keep
from workbench.cli.output import note, out, print_json
from workbench.cli.tasks import SMALL_POOL, working
from workbench.spec.errors import OptionError

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.kv_bars import Row
    from workbench.core.quality_windows import QualitySettings
    from workbench.core.session import Session
    from workbench.spec.run import Run

KV_BARS, KV_DOMAINS = "kv_bars", "kv_domains"
_SIZES = ("context", "score", "windows")
_Measured = tuple["Run", list[tuple[str, ...]]]


def bench_quality(
    name: str,
    model: str,
    only: tuple[str, ...],
    sizes: Mapping[str, int],
    where: Mapping[str, Any],
    save: bool,
    json: bool,
) -> None:
    """Measure and print the table of a name in :data:`QUALITY`; points that are known are not measured again.

    Raises :class:`OptionError` for a size or a cell that it has not, before the model is opened.
    """
    unknown = [s for s in sizes if s not in _SIZES]
    if unknown:
        raise OptionError(f"{name} has no size {unknown[0]!r}.", hint=f"Sizes are {', '.join(_SIZES)}.")
    from workbench.core.quality_windows import QualitySettings

    check, measure = QUALITY[name]
    check(only)
    settings = QualitySettings(greedy=0, **sizes)
    with working(name, model, limits=SMALL_POOL, **where) as (session, wait):
        run, rows = measure(session, wait, settings, only)
    _show(run, rows, settings, save, json)


def _check_bars(only: tuple[str, ...]) -> None:
    from workbench.core.kv_bars import bar_methods

    bar_methods(only)


def _kv_bars(
    session: Session, wait: Callable[[Job], Any], settings: QualitySettings, only: tuple[str, ...]
) -> _Measured:
    from workbench.core.kv_bars import Row, bars_run, submit_bars
    from workbench.core.kv_points import Points

    found = wait(submit_bars(session, settings, only=only, points=Points()))
    run = bars_run(session, settings, found)
    return run, [_bar_row(Row(**r)) for r in run.plan["bench"]["rows"]]


def _check_domains(only: tuple[str, ...]) -> None:
    from workbench.core.kv_domains import chosen_domains

    chosen_domains(only)


def _kv_domains(
    session: Session, wait: Callable[[Job], Any], settings: QualitySettings, only: tuple[str, ...]
) -> _Measured:
    """KVTC by domain of text, with the shipped calibration and with one of the other domains."""
    from workbench.core.kv_domains import domains_run, submit_domains
    from workbench.core.kv_points import Points

    run = domains_run(session, settings, wait(submit_domains(session, settings, only=only, points=Points())))
    return run, [_domain_row(run, name) for name in run.contestants]


QUALITY = {KV_BARS: (_check_bars, _kv_bars), KV_DOMAINS: (_check_domains, _kv_domains)}
"""Benchmarks of bytes and quality, not of time: what checks their cells, and what measures them."""


def _domain_row(run: Run, name: str) -> tuple[str, ...]:
    numbers = {m: run.metric(f"{name}:{m}") for m in ("codec_ratio", "kl", "perplexity_change")}
    forms = zip(("{:.2f}", "{:.4f}", "{:+.2f}"), numbers.values(), strict=True)
    kl = numbers["kl"]
    spread = "{:.3g} … {:.3g}".format(*kl.spread) if kl is not None and kl.spread else ""
    return (name, *(f.format(m.value) if m is not None else "–" for f, m in forms), spread, "")


def _bar_row(row: Row) -> tuple[str, ...]:
    codec = f"{row.codec:.2f}" if row.codec is not None else "–"
    met = "" if row.met is None else "met" if row.met else "MISSED"
    return row.technique, codec, f"{row.kl:.4f}", f"{row.change:+.2f}", row.bar, met


def _show(
    run: Run, rows: Sequence[tuple[str, ...]], settings: QualitySettings, save: bool, json: bool
) -> None:
    saved, trouble = keep(run) if save else (False, "")
    if json:
        print_json({**run.to_dict(), "saved": saved})
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("technique", "codec ×", "KL", "ΔPPL %", "", ""):
            table.add_column(name, justify="right" if name in ("codec ×", "KL", "ΔPPL %") else "left")
        for row in rows:
            table.add_row(*(Text(cell, style="bold" if cell == "MISSED" else "") for cell in row))
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
