"""``workbench sweep``: rate-distortion curves of all KV methods, continued where they were stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from workbench.cli import options as o
from workbench.cli.kv_tables import show_methods
from workbench.cli.output import note, out
from workbench.cli.tasks import SMALL_POOL, working
from workbench.spec.errors import Cancelled, OptionError

_TEXT = "Text"
KV = "kv"
_GOES_ON = "What was measured is kept: the same command goes on from there."


def sweep(
    what: Annotated[str, typer.Argument(help=f"What to sweep: {KV}.")] = KV,
    technique: Annotated[
        list[str], typer.Option(metavar="ID", help="Only this technique's curve; may be repeated.")
    ] = [],  # noqa: B006 - the command-line library copies it
    model: o.Model = o.DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text; default: the held-out text.", rich_help_panel=_TEXT)
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens before those scored.", rich_help_panel=_TEXT)] = 1024,
    score: Annotated[int, typer.Option(help="Tokens scored per window.", rich_help_panel=_TEXT)] = 192,
    windows: Annotated[int, typer.Option(help="Windows of the text.", rich_help_panel=_TEXT)] = 5,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure known points again.")] = False,
    dtype: o.DType = o.DTypeName.float32,
    numerics: o.Numerics = o.NumericsName.fast,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="A run per point in the run store.")] = False,
    json: o.Json = False,
) -> None:
    """Every KV format and codec at every point of its curve, by protocol P1: bytes against quality.

    Points are kept as they are measured; stopped in the middle, the same command goes on from there.
    """
    if what != KV:
        raise OptionError(f"{what!r} cannot be swept.", hint=f"Write: workbench sweep {KV}")
    o.set_threads(threads)
    from workbench.core.kv_methods import grid
    from workbench.core.kv_p1 import submit_p1, that_fit
    from workbench.core.kv_points import Points
    from workbench.core.kv_runs import RatePoint, frontier, p1_run
    from workbench.core.quality_windows import QualitySettings

    named = {str(m): m for m in grid(technique)}
    settings = QualitySettings(greedy=0, context=context, score=score, windows=windows)
    points = Points(fresh=fresh)
    where = o.place_of(dtype, numerics, device, threads=threads)
    with working("sweeping", model, limits=SMALL_POOL, **where) as (session, wait):
        methods, left_out = that_fit(session, dict(named), settings)
        try:
            found = wait(submit_p1(session, methods, text=text, settings=settings, points=points))
        except Cancelled as error:
            raise Cancelled(error.message, hint=error.hint if points.trouble else _GOES_ON) from None
        runs = [p1_run(session.plan, named[n], r, settings, session.profile) for n, r in found.items()]
    if points.trouble:
        note(f"note: points were not kept: {points.trouble}")
    curve = [p for run in runs if (p := RatePoint.of(run)) is not None]
    best = [p.method for p in frontier(curve)]
    show_methods(runs, save, json, frontier=best, left_out=left_out)
    if not json:
        for line in left_out:
            out().print(f"· {line}", markup=False)
        out().print(f"· not beaten in both codec ratio and KL: {', '.join(best)}", markup=False)
