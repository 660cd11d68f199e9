"""``workbench measure``: what recipes and KV methods cost in quality, against the plain engine.

A recipe (``--use``) is measured through its own engine. KV methods (``--method``, several at once) are
measured on one exact context each, by what they give back of it.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli import options as o
from workbench.cli.generate import keep, show
from workbench.cli.kv_tables import show_methods
from workbench.cli.tasks import SMALL_POOL, working
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe

if TYPE_CHECKING:
    from workbench.spec.run import Run

_TEXT, _NEEDLE = "Text", "Needle"


class ProtocolName(StrEnum):
    """What is asked of a model."""

    p1 = "p1"
    ppl = "ppl"
    needle = "needle"


def measure(
    use: o.Uses = [],  # noqa: B006 - the command-line library copies it
    recipe: o.RecipeFile = None,
    method: Annotated[
        list[str],
        typer.Option(
            metavar="ID[:k=v,…][+ID…]",
            help="A KV method, e.g. kivi:bits=2, kvtc:ratio=16, snapkv:keep=0.5; may be repeated.",
            rich_help_panel="Recipe",
        ),
    ] = [],  # noqa: B006
    model: o.Model = o.DEFAULT_MODEL,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text; default: the held-out text.", rich_help_panel=_TEXT)
    ] = None,
    protocol: Annotated[
        ProtocolName,
        typer.Option(
            help="p1: a context is prefilled, then scored through its cache; ppl: whole windows; "
            "needle: what was hidden in a context is asked for.",
            rich_help_panel=_TEXT,
        ),
    ] = ProtocolName.p1,
    context: Annotated[int, typer.Option(help="Tokens before those scored.", rich_help_panel=_TEXT)] = 1024,
    score: Annotated[int, typer.Option(help="Tokens scored per window.", rich_help_panel=_TEXT)] = 192,
    windows: Annotated[int, typer.Option(help="Windows of the text.", rich_help_panel=_TEXT)] = 5,
    greedy: Annotated[
        int, typer.Option(help="Greedy tokens until outputs part; 0: skip.", rich_help_panel=_TEXT)
    ] = 32,
    depths: Annotated[int, typer.Option(help="Depths of the needle.", rich_help_panel=_NEEDLE)] = 5,
    trials: Annotated[int, typer.Option(help="Needles per depth.", rich_help_panel=_NEEDLE)] = 2,
    aware: Annotated[
        bool,
        typer.Option(
            "--aware/--agnostic",
            help="Whether the question is known when the cache is coded or thinned out.",
            rich_help_panel=_NEEDLE,
        ),
    ] = False,
    seed: o.Seed = 0,
    dtype: o.DType = o.DTypeName.bfloat16,
    numerics: o.Numerics = o.NumericsName.fast,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the runs in the run store.")] = True,
    json: o.Json = False,
) -> None:
    """Perplexity, KL and agreement against the plain engine, or recall of what was hidden in a context."""
    wanted = o.recipe_of(use, recipe)
    if method and (len(wanted) or protocol == ProtocolName.ppl):
        raise OptionError(
            "--method measures what KV methods do to a context; it goes with neither --use nor ppl.",
            hint="Give --method alone, with protocol p1 or needle.",
        )
    o.set_threads(threads)
    where = o.place_of(dtype, numerics, device, threads=threads)
    sizes = {"context": context, "score": score, "windows": windows}
    asked: dict[str, Any]
    if protocol == ProtocolName.needle:
        asked = {"context": context, "depths": depths, "trials": trials, "aware": aware, "seed": seed}
        show_methods(_needle(model, wanted, method, text, asked, where), save, json)
    elif method:
        show_methods(_methods(model, method, text, sizes, where), save, json)
    else:
        asked = {**sizes, "protocol": protocol.value, "greedy": greedy}
        _recipe(model, wanted, text, asked, where, save, json)


def _recipe(
    model: str,
    recipe: Recipe,
    text: Path | None,
    settings: dict[str, Any],
    where: dict[str, Any],
    save: bool,
    json: bool,
) -> None:
    from workbench.core.quality import submit_quality
    from workbench.core.quality_windows import QualitySettings

    asked = QualitySettings(**settings)
    with working("measuring", model, recipe, **where) as (session, wait):
        made = wait(submit_quality(session, recipe, text=text, settings=asked))
        saved, trouble = keep(made) if save else (False, "")
        show(made, saved, trouble, json)


def _methods(
    model: str, texts: list[str], text: Path | None, settings: dict[str, int], where: dict[str, Any]
) -> list[Run]:
    from workbench.core.kv_methods import method
    from workbench.core.kv_p1 import submit_p1
    from workbench.core.kv_runs import p1_run
    from workbench.core.quality_windows import QualitySettings

    asked = QualitySettings(greedy=0, **settings)
    named = {str(m): m for m in map(method, texts)}
    with working("measuring", model, limits=SMALL_POOL, **where) as (session, wait):
        found = wait(submit_p1(session, named, text=text, settings=asked))
        return [p1_run(session.plan, named[n], r, asked, session.profile) for n, r in found.items()]


def _needle(
    model: str,
    recipe: Recipe,
    texts: list[str],
    text: Path | None,
    settings: dict[str, Any],
    where: dict[str, Any],
) -> list[Run]:
    from workbench.core.kv_methods import method
    from workbench.core.needle import NeedleSettings
    from workbench.core.needle_run import needle_run, submit_needle

    asked = NeedleSettings(**settings)
    named: dict[str, Recipe] = {str(m): m for m in map(method, texts)}
    if len(recipe) or not named:
        named[str(recipe)] = recipe
    with working("asking", model, limits=SMALL_POOL, **where) as (session, wait):
        found = wait(submit_needle(session, named, text=text, settings=asked))
        return [needle_run(session.plan, named[n], r, asked, session.profile) for n, r in found.items()]
