"""``workbench bench``: named benchmarks, contestants interleaved in a fresh process, ratios with spread.

The fresh process is the ``bench`` profile; ``--here`` measures inside this one instead. What was finished
before an interrupt is kept and shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli import drafters as d
from workbench.cli import options as o
from workbench.cli.bars import QUALITY, bench_quality
from workbench.cli.generate import keep
from workbench.cli.output import Meter, interruptible, note, print_json
from workbench.cli.start import CANCELLED
from workbench.core import catalog
from workbench.core.peers import PEERS
from workbench.spec.errors import Cancelled, JobFailed, OptionError
from workbench.spec.recipe import Recipe

if TYPE_CHECKING:
    from workbench.core.benchmark import BenchSettings
    from workbench.spec.run import Run

ALL, PLAIN = "all", "plain"


def bench(
    name: Annotated[
        str,
        typer.Argument(
            help="A benchmark, or: all. An unknown name lists them. Of quality: kv_bars, kv_domains. Of "
            "drafters on real prompts: drafters."
        ),
    ] = ALL,
    use: o.Uses = [],  # noqa: B006 - the command-line library copies it
    recipe: o.RecipeFile = None,
    contestant: Annotated[
        list[str],
        typer.Option(metavar="ID+ID…", help="A recipe of its own, or: plain; may be repeated."),
    ] = [],  # noqa: B006
    peer: Annotated[list[str], typer.Option(help=f"{', '.join(PEERS)}; may be repeated.")] = [],  # noqa: B006
    model: o.Model = o.DEFAULT_MODEL,
    rounds: Annotated[
        int, typer.Option(min=1, help="Turns of each contestant, after one that warms up.")
    ] = 7,
    cell: Annotated[list[str], typer.Option(help="Only this cell; may be repeated.")] = [],  # noqa: B006
    size: Annotated[
        list[str], typer.Option(metavar="NAME=N", help="A size of every cell, e.g. context=64.")
    ] = [],  # noqa: B006
    here: Annotated[bool, typer.Option("--here", help="In this process: profile interactive.")] = False,
    dtype: o.DType = o.DTypeName.bfloat16,
    numerics: o.Numerics = o.NumericsName.fast,
    device: o.Device = "cpu",
    threads: o.Threads = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the runs in the run store.")] = True,
    json: o.Json = False,
    prompts: d.Prompts = [],  # noqa: B006
    batch: d.Batches = [],  # noqa: B006
    weights: d.Weights = [],  # noqa: B006
    vocab: d.Vocab = [],  # noqa: B006
    temperature: d.Temperature = 0.0,
    deadline: d.Deadline = 0.0,
    fresh: d.Fresh = False,
) -> None:
    """Measure this machine: recipes against each other, and other engines beside them."""
    recipes = contestants(use, recipe, contestant)
    sizes = sizes_of(size)
    o.set_threads(threads)
    asked = d.Asked(prompts, batch, weights, vocab, temperature, deadline, fresh)
    if name == d.DRAFTERS:
        if peer:
            raise OptionError(f"{name} has no peers.", hint="Leave --peer out.")
        classes = tuple(dict.fromkeys((numerics.value, o.NumericsName.pinned.value)))
        where: dict[str, Any] = {"dtype": dtype.value, "numerics": classes, "device": device}
        drafted = d.settings_of(model, recipes, asked, cells=tuple(cell), sizes=sizes, **where)
        d.bench_drafters(drafted, threads, here, save, json)
        return
    if asked.given:
        raise OptionError(f"{name} has no {asked.given[0]}.", hint=f"It is an option of {d.DRAFTERS}.")
    if name in QUALITY:
        if recipes or peer:
            raise OptionError(f"{name} has methods of its own.", hint="Choose among them with --cell.")
        bench_quality(name, model, tuple(cell), sizes, o.place_of(dtype, numerics, device), save, json)
        return
    from workbench.core.benchmark import BENCHES, BenchSettings

    if name not in (ALL, *BENCHES):
        raise OptionError(
            f"{name!r} is no benchmark.",
            hint=f"Choose one of {', '.join((*BENCHES, *QUALITY, d.DRAFTERS))}, or {ALL}.",
        )
    wanted = [
        BenchSettings(
            name=each,
            model=model,
            recipes=recipes,
            peers=tuple(peer),
            rounds=rounds,
            cells=tuple(cell),
            sizes=sizes,
            dtype=dtype.value,
            numerics=numerics.value,
            device=device,
        )
        for each in (BENCHES if name == ALL else [name])
    ]
    for settings in wanted:
        settings.chosen()  # every name is checked before the first minute is spent
    made, complete = _run_all(wanted, threads, here)
    saved = [keep(run)[0] for run in made] if save else [False] * len(made)
    if json:
        rows = [{**_without_steps(r), "saved": s} for r, s in zip(made, saved, strict=True)]
        print_json({"state": "done" if complete else "cancelled", "runs": rows})
    else:
        from workbench.cli.summary import print_summary

        for run, kept in zip(made, saved, strict=True):
            print_summary(run, kept)
    if not complete:
        raise typer.Exit(CANCELLED)


def contestants(use: list[str], recipe: Any, texts: list[str]) -> tuple[Recipe, ...]:
    """The recipes that compete: each ``--contestant``, or plain against ``--use``; none: the benchmark's own.

    Raises :class:`RecipeError` for what cannot be read or does not exist, before a process is started.
    """
    named = [Recipe.of(*filter(None, ("" if t == PLAIN else t).split("+"))) for t in texts]
    composed = o.recipe_of(use, recipe)
    if len(composed):
        named = [*(named or [Recipe()]), composed]
    for one in named:
        catalog.normalise(one)
    return tuple(named)


def sizes_of(texts: list[str]) -> dict[str, int]:
    """``["context=64"]`` as numbers. Raises :class:`OptionError`."""
    out = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not name or not value.isdecimal() or len(value) > 15:  # beyond that, ratios are no floats
            raise OptionError(f"--size {text!r} is not NAME=N.", hint="For example --size context=64.")
        out[name] = int(value)
    return out


def _run_all(wanted: list[BenchSettings], threads: int | None, here: bool) -> tuple[list[Run], bool]:
    """The runs in order, and whether none was cancelled."""
    made: list[Run] = []
    with interruptible() as cancel:
        for settings in wanted:
            with Meter(settings.name) as meter:
                try:
                    made.append(_run_one(settings, threads, here, meter, cancel.is_set))
                except (Cancelled, JobFailed) as error:
                    if not cancel.is_set():
                        raise
                    note(f"{settings.name}: {error.message if isinstance(error, Cancelled) else 'cancelled'}")
                    return made, False
    return made, True


def _run_one(
    settings: BenchSettings, threads: int | None, here: bool, meter: Meter, cancelled: Callable[[], bool]
) -> Run:
    def tell(done: float, total: float, what: str) -> None:
        meter(done / total if total else 0.0, what)
        if here and cancelled():
            raise Cancelled(f"The benchmark {settings.name} was cancelled.")

    if here:
        from workbench.core.benchmark import run_benchmark

        return run_benchmark(settings, tell)
    from workbench.core.benchmark_process import benchmark_in_fresh_process

    return benchmark_in_fresh_process(settings, threads=threads, tell=tell, cancel=cancelled)


def _without_steps(run: Run) -> dict[str, Any]:
    data = run.to_dict()
    data.pop("steps")
    return data
