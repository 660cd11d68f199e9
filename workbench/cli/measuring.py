"""``workbench measure``: what a recipe costs in quality, against the plain engine of the same weights."""

from __future__ import annotations

import threading
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli import options as o
from workbench.cli.generate import keep, show
from workbench.cli.output import Meter, interruptible
from workbench.cli.start import HINT, MESSAGE
from workbench.spec.errors import Cancelled
from workbench.spec.events import Event, JobEvent

if TYPE_CHECKING:
    from workbench.core.jobs import Job

_TEXT = "Text"


class ProtocolName(StrEnum):
    """How text is scored."""

    p1 = "p1"
    ppl = "ppl"


def measure(
    use: o.Uses = [],  # noqa: B006 - the command-line library copies it
    recipe: o.RecipeFile = None,
    model: o.Model = o.DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text; default: the held-out text.", rich_help_panel=_TEXT)
    ] = None,
    protocol: Annotated[
        ProtocolName,
        typer.Option(
            help="p1: a context is prefilled, then scored through its cache; ppl: whole windows.",
            rich_help_panel=_TEXT,
        ),
    ] = ProtocolName.p1,
    context: Annotated[int, typer.Option(help="Tokens before those scored.", rich_help_panel=_TEXT)] = 1024,
    score: Annotated[int, typer.Option(help="Tokens scored per window.", rich_help_panel=_TEXT)] = 192,
    windows: Annotated[int, typer.Option(help="Windows of the text.", rich_help_panel=_TEXT)] = 5,
    greedy: Annotated[
        int, typer.Option(help="Greedy tokens until outputs part; 0: skip.", rich_help_panel=_TEXT)
    ] = 32,
    dtype: o.DType = o.DTypeName.bfloat16,
    numerics: o.Numerics = o.NumericsName.fast,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the run in the run store.")] = True,
    json: o.Json = False,
) -> None:
    """Perplexity, KL and agreement of a recipe against the plain engine, on text neither has seen."""
    wanted = o.recipe_of(use, recipe)
    o.set_threads(threads)
    from workbench.core.quality import submit_quality
    from workbench.core.quality_windows import QualitySettings
    from workbench.core.session import Session

    settings = QualitySettings(
        protocol=protocol.value, context=context, score=score, windows=windows, greedy=greedy
    )
    where: dict[str, Any] = {
        "dtype": dtype.value,
        "numerics": numerics.value,
        "device": device,
        "threads": threads,
    }
    with (
        Meter("measuring") as meter,
        Session(model, wanted, **where) as session,
        interruptible() as cancel,
    ):

        def listen(event: Event) -> None:
            if isinstance(event, JobEvent) and event.kind == "task" and event.total:
                meter(event.done / event.total, event.message)

        session.listen(listen)
        made = finished(submit_quality(session, wanted, text=text, settings=settings), cancel)
        saved, trouble = keep(made) if save else (False, "")
        show(made, saved, trouble, json)


def finished(job: Job, cancel: threading.Event) -> Any:
    """A job's result. Raises :class:`Cancelled` once ``cancel`` is set; closing the session ends the job."""
    while not job.wait(0.05):
        if cancel.is_set():
            raise Cancelled(MESSAGE, hint=HINT)
    return job.result()
