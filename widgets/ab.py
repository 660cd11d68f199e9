"""A against B, fairly: one session, interleaved runs, ratios of neighbours, with spread.

A and B are run in turn, so that a machine that slows down slows both; each repetition gives one ratio, and
what is shown is their median with the lowest and the highest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

from workbench.spec.errors import RecordError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run
from workbench.widgets import figures, words
from workbench.widgets.palette import A, B, Theme
from workbench.widgets.table import Table
from workbench.widgets.views.latency import NAMES
from workbench.widgets.views.memory import label


@dataclass(frozen=True)
class AB:
    """Runs of two recipes in pairs, in the order they were made."""

    a: tuple[Run, ...]
    b: tuple[Run, ...]

    def __post_init__(self) -> None:
        if not self.a or len(self.a) != len(self.b):
            raise RecordError("A comparison needs as many runs of A as of B, and at least one.")

    def values(self, name: str) -> tuple[list[float], list[float]]:
        """A metric's values of both sides; ``kv``: bytes of KV in use, ``tau``: tokens per draft."""
        return [_value(r, name) for r in self.a], [_value(r, name) for r in self.b]

    def ratio(self, name: str) -> Metric | None:
        """B over A of neighbouring runs: median and spread."""
        pairs = [y / x for x, y in zip(*self.values(name), strict=True) if x > 0 and y > 0]
        if not pairs:
            return None
        return Metric(
            name, median(pairs), "×", n=len(pairs), spread=(min(pairs), max(pairs)), of=label(self.a[0])
        )

    @property
    def text(self) -> str:
        """Whether both sides produced the same tokens."""
        return words.text_agreement(self.a[0].token_ids, self.b[0].token_ids)

    def table(self) -> Table:
        """Median (lowest–highest) of both sides, and the ratio with its own spread."""
        rows = []
        for name, title, unit in (
            *(
                (n, t, "tok/s" if n == "decode_speed" else "ms")
                for n, t in NAMES.items()
                if n not in ("overhead", "itl")
            ),
            ("kv", "KV in use", "MiB"),
            ("tau", "τ, tokens per draft", ""),
        ):
            x, y = self.values(name)
            if any(x) or any(y):
                rows.append((title, _spread(x, unit), _spread(y, unit), _ratio(self.ratio(name)), "measured"))
        pairs = f"{len(self.a)} interleaved {'pair' if len(self.a) == 1 else 'pairs'}"
        pairs += ", median (lowest–highest); B / A within each pair"
        kinds = f"A is {self.a[0].plan.get('kind', '–')}, B is {self.b[0].plan.get('kind', '–')}"
        note = f"{pairs}. Text: {self.text}; {kinds}."
        header = ("", f"A: {label(self.a[0])}", f"B: {label(self.b[0])}", "B / A", "tag")
        return Table.of(header, rows, note=note)

    def figure(self, theme: Theme = "auto") -> Any:
        """Decode speed of every run of both sides: each mark is one measured run."""
        out = figures.new("Decode speed, one mark per run", theme=theme, x="tok/s")
        for runs, colour, side in ((self.b, B, "B"), (self.a, A, "A")):
            speeds = [_value(r, "decode_speed") for r in runs]
            out.add_scatter(
                x=speeds, y=[f"{side}: {label(runs[0])}"] * len(speeds), mode="markers", showlegend=False,
                marker={**figures.marker("measured", colour), "size": 11, "opacity": 0.8},
                hovertemplate="%{x:.3g} tok/s<extra></extra>",
            )  # fmt: skip
        out.update_layout(height=244)
        out.update_xaxes(rangemode="tozero")
        return out

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return self.table()._repr_mimebundle_()


def measure(run: Callable[[Recipe], Run], a: Recipe, b: Recipe, repeats: int, budget_s: float = inf) -> AB:
    """Run both in turn: a pair to warm up, then ``repeats`` pairs, or as many as ``budget_s`` seconds allow.

    When there is time for one pair only, or one is asked for, the first pair counts.
    """
    left: list[Run] = []
    right: list[Run] = []
    start = perf_counter()
    for _ in range(repeats if repeats == 1 else repeats + 1):
        left.append(run(a))
        right.append(run(b))
        if perf_counter() - start > budget_s:
            break
    skip = 0 if len(left) == 1 else 1
    return AB(tuple(left[skip:]), tuple(right[skip:]))


def _value(run: Run, name: str) -> float:
    if name == "kv":
        return words.kv_in_use(run.memory) / 2**20
    if name == "tau":
        return float(run.acceptance.get("tau") or 0.0)
    metric = run.metric(name)
    return metric.value if metric is not None else 0.0


def _spread(values: Sequence[float], unit: str) -> str:
    present = [v for v in values if v]
    if not present:
        return "–"
    text = f"{words.number(median(present))} {unit}".strip()
    return text + (
        f" ({words.number(min(present))}–{words.number(max(present))})" if len(present) > 1 else ""
    )


def _ratio(metric: Metric | None) -> str:
    if metric is None:
        return "–"
    text = f"{metric.value:.2f}×"
    if metric.n > 1 and metric.spread is not None:
        text += f" ({metric.spread[0]:.2f}–{metric.spread[1]:.2f})"
    return text
