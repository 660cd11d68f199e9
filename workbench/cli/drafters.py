"""``workbench bench drafters``: what every drafter gains, what was predicted, and where it stops paying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.generate import keep
from workbench.cli.output import Meter, interruptible, note, out, print_json
from workbench.spec.errors import Cancelled

if TYPE_CHECKING:
    from workbench.core.drafters.settings import DrafterSettings
    from workbench.spec.run import Run

DRAFTERS = "drafters"
_PANEL = "drafters only"
_GOES_ON = "What was measured is kept: the same command goes on from there."

Prompts = Annotated[
    list[str],
    typer.Option(
        metavar="SET|FILE",
        help="mixed, chat, copy_heavy, or a file of prompts, one JSON object a line; may be repeated.",
        rich_help_panel=_PANEL,
    ),
]
Batches = Annotated[
    list[int], typer.Option("--batch", min=1, help="A batch size; may be repeated.", rich_help_panel=_PANEL)
]
Weights = Annotated[
    list[str],
    typer.Option(
        help="unquantized, or a technique such as rtn:bits=4; may be repeated. The first at every batch "
        "size, the others at the first of them.",
        rich_help_panel=_PANEL,
    ),
]
Vocab = Annotated[
    list[int],
    typer.Option(
        min=1, help="Every head once more, drafting from so many tokens; may be repeated.",
        rich_help_panel=_PANEL,
    ),
]  # fmt: skip
Temperature = Annotated[float, typer.Option(min=0.0, help="Of sampling; 0: greedy.", rich_help_panel=_PANEL)]
Deadline = Annotated[
    float,
    typer.Option(
        min=0.0, help="Seconds after which no turn is begun; the same command goes on. 0: none.",
        rich_help_panel=_PANEL,
    ),
]  # fmt: skip
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure what is known again.", rich_help_panel=_PANEL)]


@dataclass(frozen=True)
class Asked:
    """Options that only this benchmark has, as given."""

    prompts: Sequence[str]
    batches: Sequence[int]
    weights: Sequence[str]
    vocab: Sequence[int]
    temperature: float
    deadline: float
    fresh: bool

    @property
    def given(self) -> list[str]:
        """Those that were given, for a benchmark that has none of them."""
        return [f"--{n.removesuffix('es') if n == 'batches' else n}" for n, v in vars(self).items() if v]


def bench_drafters(
    settings: DrafterSettings, threads: int | None, here: bool, save: bool, json: bool
) -> None:
    """Measure what is missing, and print all that is known.

    Raises :class:`OptionError` for names that do not exist, :class:`Cancelled` with what was measured kept.
    """
    settings.chosen()
    with Meter(DRAFTERS) as meter, interruptible() as cancel:

        def tell(done: float, total: float, what: str) -> None:
            meter(done / total if total else 0.0, what)
            if here and cancel.is_set():
                raise Cancelled("The comparison of drafters was cancelled.", hint=_GOES_ON)

        try:
            if here:
                from workbench.core.drafters.bench import run_drafters

                run = run_drafters(settings, tell)
            else:
                from workbench.core.drafters.process import drafters_in_fresh_process

                run = drafters_in_fresh_process(settings, threads=threads, tell=tell, cancel=cancel.is_set)
        except Cancelled as error:
            raise Cancelled(error.message, hint=_GOES_ON) from None
    saved, trouble = keep(run) if save else (False, "")
    if json:
        print_json({**run.to_dict(), "saved": saved})
    else:
        _show(run)
    if trouble:
        note(f"note: {trouble}" if saved else f"note: the run was not saved: {trouble}")


def settings_of(model: str, drafters: Sequence[Any], asked: Asked, **rest: Any) -> DrafterSettings:
    """Settings, with defaults for what was not given."""
    from workbench.core.drafters.settings import DrafterSettings

    lists = {n: tuple(v) for n in ("prompts", "batches", "weights", "vocab") if (v := getattr(asked, n))}
    if "prompts" in lists:  # a file is named from here, whatever folder the process starts in
        lists["prompts"] = tuple(str(Path(p).absolute()) if Path(p).is_file() else p for p in asked.prompts)
    return DrafterSettings(
        model,
        tuple(r for r in drafters if len(r)),
        temperature=asked.temperature,
        deadline_s=asked.deadline,
        fresh=asked.fresh,
        **lists,
        **rest,
    )


def _show(run: Run) -> None:
    bench = run.plan["bench"]
    for cell, about in bench["cells"].items():
        rows = [r for r in bench["rows"] if r["cell"] == cell]
        if rows:
            plain = f"plain {rows[0]['plain_rate']:.1f} tok/s, {rows[0]['plain_ms']:.2f} ms a step"
            measured = f"{about['measured']} of {about['turns']} turns"
            _table(f"{cell}: {plain}; {measured}", _ROW, map(_row, rows))
    if bench["crossings"]:
        _table("stops paying at a batch of", _CROSSING, map(_crossing, bench["crossings"]))
    if bench["vocabulary"]:
        _table("tokens that heads draft from", _COVERED, map(_covered, bench["vocabulary"]))
    console, p = out(), run.provenance
    sizes = f"{bench['sizes']['tokens']} tokens an answer, temperature {bench['temperature']:g}"
    place = f" on {p.cpu}, {p.threads} threads, profile {p.profile}" if p else ""
    console.print(
        f"\n· {run.model} · {run.dtype} · {sizes} · measured{place}"
        "\n· × plain: of all prompts together; turns: the worst and the best; pred.: predicted from other "
        "prompts and costs measured apart"
        "\n· error: mean of both halves of the prompts, own: the same predicted from themselves; what is "
        "between them is how much prompts differ"
        "\n· per fwd: tokens per forward; drafts: share of steps that have one; ms: medians of those",
        markup=False,
    )
    for line in (*_judged(bench), *run.notes):
        console.print(f"· {line}", markup=False)


def _judged(bench: Mapping[str, Any]) -> list[str]:
    """How many predictions hold, by the bars: 15 % of a speed-up, one power of two of a batch size."""
    from workbench.core.drafters.results import BAR

    errors = [r["error"] for r in bench["rows"] if r["error"] is not None]
    apart = [c["doublings"] for c in bench["crossings"] if c["doublings"] is not None]
    out = [f"{sum(e <= BAR for e in errors)} of {len(errors)} speed-ups predicted within {BAR:.0%}"] * bool(
        errors
    )
    out += [f"{sum(a <= 1 for a in apart)} of {len(apart)} crossovers within a power of two"] * bool(apart)
    return out


_ROW = (
    "drafter", "× plain", "turns", "pred.", "error", "own", "τ", "per fwd", "survival", "drafts", "draft ms",
    "fwd ms", "rest ms", "same text",
)  # fmt: skip
_CROSSING = ("prompts", "drafter", "measured", "predicted", "doublings apart", "measured × by batch",
             "predicted × by batch")  # fmt: skip
_COVERED = ("cell", "head", "tokens", "coverage", "drafter", "τ", "draft ms")


def _row(r: Mapping[str, Any]) -> tuple[str, ...]:
    survival = " ".join(f"{s:.2f}" for s in r["survival"][:3])
    return (
        r["drafter"],
        f"{r['speedup']:.2f}",
        f"{r['low']:.2f}–{r['high']:.2f}",
        _said(r["predicted"], ".2f"),
        _said(r["error"], ".0%"),
        _said(r["own_error"], ".0%"),
        _said(r["tau"], ".2f"),
        f"{r['tokens_per_forward']:.2f}",
        survival,
        f"{r['share']:.0%}",
        *(_said(r[n], ".2f") for n in ("draft_ms", "forward_ms", "other_ms")),
        f"{r['same']} of {r['prompts']}",
    )


def _crossing(c: Mapping[str, Any]) -> tuple[str, ...]:
    beyond = f"above {c['batches'][-1]}"
    at = (beyond if v is None else f"{v:.3g}" for v in (c["at"], c["predicted_at"]))
    gains = (
        " ".join(f"{b}: {g:.2f}" for b, g in zip(c["batches"], c[n], strict=True))
        for n in ("measured", "predicted")
    )
    return c["prompts"], c["drafter"], *at, _said(c["doublings"], ".2f"), *gains


def _covered(c: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = (_said(c[n], ".2f") for n in ("tau", "draft_ms"))
    return c["cell"], c["head"], f"{c['size']:,}", f"{c['coverage']:.3f}", c["drafter"], *numbers


def _said(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _table(title: str, columns: Sequence[str], rows: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", title_style="bold"
    )
    for name in columns:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = out()
    console.print()
    console.print(table)
