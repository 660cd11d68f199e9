"""At which batch size does speculation stop paying? Speed-up over the batch, measured and predicted.

Verification makes B (γ+1) rows of B. While the machine waits for weights, more rows are nearly free; once its
arithmetic is busy they cost what they are, and rejected drafts are wasted work. The predicted line takes the
tokens a round gains at batch 1 and the measured cost of steps by their rows; it knows nothing of the runs it
is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from workbench.core.verify_cost import measure_step_curve
from workbench.engine.params import SamplingParams
from workbench.spec.errors import OptionError, RecordError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run
from workbench.speculative import predict
from workbench.speculative.stats import acceptance
from workbench.widgets import figures, words
from workbench.widgets.palette import INKS, B, Theme
from workbench.widgets.spec_views.badge import judged_by
from workbench.widgets.spec_views.round_time import round_times
from workbench.widgets.spec_views.stored import steps_of
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.session import Session

_COLOURS = (B, "#d9822b", "#12908e", "#8a63c9", "#a08448")
_MARKS = ("circle", "square", "diamond", "cross", "triangle-up")


@dataclass(frozen=True)
class Series:
    """Speed-up of one drafter by batch size; ``predicted`` may be empty. ``judged``: its rule and badge."""

    name: str
    batches: tuple[int, ...]
    measured: tuple[Metric, ...]
    predicted: tuple[float, ...] = ()
    judged: str = ""
    note: str = ""

    def crossover(self, predicted: bool = False) -> float | None:
        """Batch size at which nothing is gained any more; None within the sizes measured."""
        gains = self.predicted if predicted else [m.value for m in self.measured]
        return predict.crossover(self.batches, gains)


@dataclass(frozen=True)
class BatchGains:
    """Speed-ups over the batch, of one drafter or of several."""

    title: str
    series: tuple[Series, ...]

    def figure(self, theme: Theme = "auto") -> Any:
        """Marks and bars measured, long dashes predicted; below the line at 1 drafting costs."""
        out = figures.new(
            f"Speed-up by batch size: {self.title}", theme=theme,
            x="sequences in the batch (log)", y="× of the same batch without drafts",
        )  # fmt: skip
        for i, s in enumerate(self.series):
            colour, mark = _COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)]
            values = [m.value for m in s.measured]
            spread = [m.spread or (m.value, m.value) for m in s.measured]
            if s.predicted:
                out.add_scatter(
                    x=s.batches, y=s.predicted, mode="lines", name=f"{s.name}, predicted", legendgroup=s.name,
                    line=figures.line("predicted", colour, 1.5),
                    hovertemplate="batch %{x}: %{y:.2f}× predicted<extra></extra>",
                )  # fmt: skip
            out.add_scatter(
                x=s.batches, y=values, mode="lines+markers", name=f"{s.name}, measured", legendgroup=s.name,
                line=figures.line("measured", colour, 2), marker={"symbol": mark, "size": 9, "color": colour},
                error_y={
                    "type": "data", "symmetric": False, "thickness": 1, "width": 3, "color": colour,
                    "array": [high - v for v, (_, high) in zip(values, spread, strict=True)],
                    "arrayminus": [v - low for v, (low, _) in zip(values, spread, strict=True)],
                },
                hovertemplate="batch %{x}: %{y:.2f}× measured<extra></extra>",
            )  # fmt: skip
        out.add_hline(y=1, line={"color": INKS[theme]["text"], "width": 1})
        sizes = sorted({b for s in self.series for b in s.batches})
        out.update_xaxes(type="log", tickvals=sizes, ticktext=[str(b) for b in sizes])
        out.update_yaxes(rangemode="tozero")
        out.update_layout(height=380, margin={"t": 72})
        return out

    def table(self) -> Table:
        """A row per drafter and size, and where each stops paying."""
        rows = []
        for s in self.series:
            for i, (batch, m) in enumerate(zip(s.batches, s.measured, strict=True)):
                said = s.predicted[i] if s.predicted else None
                rows.append((s.name, batch, words.describe(m), said, s.judged or "–", "measured"))
        notes = []
        for s in self.series:
            notes.append(f"{s.name} stops paying {_where(s.crossover())} (measured)")
            if s.predicted:
                notes[-1] += f", {_where(s.crossover(predicted=True))} (predicted)"
        notes += [s.note for s in self.series if s.note]
        columns = ("drafter", "batch", "speed-up", "predicted", "rule", "tag")
        return Table.of(columns, rows, note="; ".join(notes) + ".")


def batches_of_bench(run: Run) -> BatchGains:
    """The same from a stored bench run that compared recipes, or drafters, at several batch sizes.

    Raises :class:`RecordError` when it is no such run.
    """
    bench = run.plan.get("bench", {})
    if bench.get("crossings"):
        return _of_drafters(run, bench["crossings"])
    sizes = {cell: int(s["batch"]) for cell, s in bench.get("cells", {}).items() if "batch" in s}
    base = next(iter(run.contestants), "")
    found = []
    for name in run.contestants[1:]:
        by = {
            batch: m
            for cell, batch in sorted(sizes.items(), key=lambda item: item[1])
            if (m := run.metric(f"{cell}:{name}/{base}")) is not None
        }
        if by:
            found.append(Series(name, tuple(by), tuple(by.values())))
    if not found:
        raise RecordError(
            "This run compares no recipes over batch sizes.",
            hint="For example: workbench bench drafters, or bench decode --contestant plain --use ngram",
        )
    return BatchGains(f"{bench.get('name')} of {run.model} against {base}", tuple(found))


def _of_drafters(run: Run, crossings: Sequence[Mapping[str, Any]]) -> BatchGains:
    found = []
    for c in crossings:
        names = [f"{c['prompts']}_b{batch}:{c['drafter']}/plain" for batch in c["batches"]]
        measured = [m for name in names if (m := run.metric(name)) is not None]
        if len(measured) == len(names):
            name = f"{c['drafter']}, {c['prompts']}"
            found.append(Series(name, tuple(c["batches"]), tuple(measured), tuple(c["predicted"])))
    return BatchGains(f"{run.model}, predicted from batch 1", tuple(found))


def measure_batches(
    session: Session,
    drafter: str | Recipe,
    prompts: Sequence[Any],
    *,
    batches: Sequence[int] = (1, 2, 4, 8),
    tokens: int = 32,
    repeats: int = 3,
    temperature: float = 0.0,
    seed: int = 0,
) -> BatchGains:
    """Measure a drafter against none at every batch size, in turn, and predict it from batch 1.

    ``prompts`` are taken in order, again from the first when there are fewer than sequences. The session's
    recipe is put back. Raises :class:`OptionError` for sizes that are none or too large for the session.
    """
    recipe = drafter if isinstance(drafter, Recipe) else Recipe.of("paged", drafter)
    most = session.plan.limits.max_sequences
    if not prompts or not batches or min(batches) < 1 or max(batches) > most or repeats < 1:
        raise OptionError(
            f"Batches of {list(batches)} cannot be measured.",
            hint=f"Give a prompt, and sizes from 1 to {most}, which the session's limits allow.",
        )
    sizes = sorted({1, *batches})
    before = session.recipe
    runs: dict[tuple[int, bool], list[Run]] = {}
    try:
        for turn in range(repeats + 1 if repeats > 1 else 1):
            for size in sizes:
                for drafted in (False, True):
                    session.apply(recipe if drafted else Recipe.of("paged")).result()
                    run = _run(session, prompts, size, tokens, temperature, seed)
                    if turn or repeats == 1:  # the first turn warms up
                        runs.setdefault((size, drafted), []).append(run)
        line, note = _predict(session, runs[1, True], runs[1, False], sizes, repeats)
    finally:
        session.apply(before).result()
    measured = [_ratio(runs[size, True], runs[size, False]) for size in sizes]
    shown = [i for i, size in enumerate(sizes) if size in batches]
    records = [d for s in steps_of(runs[1, True][0]) for d in s.drafts]
    series = Series(
        str(recipe), tuple(sizes[i] for i in shown), tuple(measured[i] for i in shown),
        tuple(line[i] for i in shown), judged_by(records), note,
    )  # fmt: skip
    return BatchGains(f"{session.plan.model}, {tokens} tokens", (series,))


def _run(session: Session, prompts: Sequence[Any], n: int, tokens: int, temperature: float, seed: int) -> Run:
    asked = [prompts[i % len(prompts)] for i in range(n)]
    params = [
        SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed + i, ignore_eos=True)
        for i in range(n)
    ]
    run: Run = session.submit_all(asked, params).result()
    return run


def _ratio(drafted: Sequence[Run], plain: Sequence[Run]) -> Metric:
    ratios = [_ms_per_token(p) / _ms_per_token(d) for d, p in zip(drafted, plain, strict=True)]
    spread = (min(ratios), max(ratios))
    return Metric(
        "speedup", median(ratios), "×", n=len(ratios), spread=spread, of="no drafts", better="higher"
    )


def _ms_per_token(run: Run) -> float:
    times = round_times(run)
    gained = sum(t.emitted for t in times)
    if not gained:
        raise RecordError("A run decoded nothing.", hint="Ask for more tokens.")
    return sum(t.total for t in times) / gained


def _predict(
    session: Session, drafted: Sequence[Run], plain: Sequence[Run], sizes: Sequence[int], repeats: int
) -> tuple[list[float], str]:
    """Speed-up by batch size from batch 1: its tokens a round, its drafting, and steps by their rows."""
    steps = [s for run in drafted for s in steps_of(run) if s.decode and not s.prefill]
    rounds = [s for s in steps if s.draft]
    if not rounds:
        raise RecordError(
            "Nothing was drafted at batch 1.", hint="Choose a drafter that finds something to draft."
        )
    tau = acceptance([d for s in rounds for d in s.drafts]).tau or 1.0
    nodes, share = fmean(s.draft for s in rounds), len(rounds) / len(steps)
    draft_ms = median(s.phase_ms.get("draft", 0.0) for s in rounds)
    padding = max(1, min(round(nodes), 16))
    step, verify = measure_step_curve(session, sizes, padding, rounds=2 + 2 * min(repeats, 4), context=64)
    out = []
    for size in sizes:
        alone = float(step(size))
        drafting = draft_ms * alone / float(step(1))  # a drafter's own passes grow as the model's do
        cost = float(verify(size * (1 + padding))) + drafting
        out.append(predict.speedup_of_share(share, tau, cost / alone))
    return out, f"predicted from τ {tau:.2f} and {nodes:.3g} drafted tokens a round at batch 1"


def _where(batch: float | None) -> str:
    return "at no size measured" if batch is None else f"at {batch:.3g}"
