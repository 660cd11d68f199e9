"""What does speculation gain, and what would it with another α, γ or c? A surface, and where a run stands.

The surface is predicted: (1 - α^(γ+1)) / (1 - α) tokens over v(γ+1) + γ c + o, with v, c and o measured in
the run's own steps (``workbench.speculative.round_costs``). The star is the run: its α and γ, and what it
gained, measured against plain steps of the same run or of a plain run beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

from workbench.spec.errors import RecordError
from workbench.spec.events import StepEvent
from workbench.spec.run import Run
from workbench.speculative import predict
from workbench.speculative.round_costs import RoundCosts, levels, round_costs
from workbench.speculative.stats import Acceptance, acceptance
from workbench.widgets import figures
from workbench.widgets.palette import INKS, SOURCES, B, Theme
from workbench.widgets.spec_views.badge import judged_by
from workbench.widgets.spec_views.round_time import round_times
from workbench.widgets.spec_views.stored import Source, steps_of
from workbench.widgets.table import Table
from workbench.widgets.views.memory import label

GAMMAS = tuple(range(1, 17))
ALPHAS = tuple(i / 20 for i in range(21))
FACTORS = (0.0, 0.5, 1.0, 2.0, 4.0)  # of the measured c, on the slider
_C = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)  # where drafting was too cheap to scale


@dataclass(frozen=True)
class OperatingPoint:
    """Where a run stands. ``gamma``: mean levels of its drafts; ``nodes``: mean drafted tokens per draft."""

    name: str
    acceptance: Acceptance
    costs: RoundCosts
    gamma: float
    nodes: float
    chains: bool
    judged: str
    rounds: int
    steps: int
    tokens: int
    ms: float
    plain_ms_per_token: float

    @cached_property
    def c(self) -> float:
        """Cost of one drafted level, in plain steps, what a draft costs at all shared out."""
        return self.costs.drafting(self.gamma) / self.gamma if self.gamma else 0.0

    @property
    def measured(self) -> float:
        """Plain time per token over this run's, in decode steps with drafts and without."""
        return self.plain_ms_per_token / (self.ms / self.tokens)

    def predicted(self, tokens_per_round: float) -> float:
        """Speed-up by the costs, if a round gave so many tokens; steps without drafts as they were."""
        cost = self.costs.round(self.costs.batch * (1 + self.nodes), self.gamma)
        return predict.speedup_of_share(self.rounds / self.steps, tokens_per_round, cost)

    @property
    def iid(self) -> float | None:
        """Tokens per round if every draft were kept with the same α: only of chains."""
        alpha = self.acceptance.alpha
        if alpha is None or not self.chains:
            return None
        low = int(self.gamma)
        part = self.gamma - low
        a, b = (predict.expected_tokens(min(alpha, 1.0), g) for g in (low, low + 1))
        return (1 - part) * a + part * b

    @property
    def by_survival(self) -> float:
        """Tokens per round by the shares of positions that were kept: 1 + their sum."""
        return predict.expected_tokens_of(self.acceptance.survival)

    def surface(self, c: float) -> list[list[float]]:
        """Predicted speed-up [γ][α] of chains, for one sequence or for the run's batch."""
        n = self.costs.batch
        return [
            [
                predict.speedup(
                    predict.expected_tokens(a, g), g, self.costs.verify(n * (g + 1)), c, self.costs.overhead
                )
                for a in ALPHAS
            ]
            for g in GAMMAS
        ]

    def best(self, alpha: float, c: float) -> tuple[int, float]:
        """The γ up to 16 that gains most, and what; (0, 1.0) where none gains."""
        n = self.costs.batch
        return predict.best_gamma(
            alpha, lambda rows: self.costs.verify(n * rows), c, self.costs.overhead, GAMMAS[-1]
        )

    def figure(self, theme: Theme = "auto") -> Any:
        """Contours of the speed-up over α and γ; the slider changes c, the star is the run."""
        ink = INKS[theme]
        title = f"Speed-up by α and γ: {self.name} (predicted; ★ measured)"
        out = figures.new(
            title, theme=theme, x="α, chance that a draft is kept", y="γ, drafted tokens a round"
        )
        costs = sorted({self.c * f for f in FACTORS} if self.c > 1e-3 else {self.c, *_C})
        first = costs.index(self.c)
        for number, c in enumerate(costs):
            z, visible = [[round(s, 3) for s in row] for row in self.surface(c)], number == first
            out.add_contour(
                z=z, x=ALPHAS, y=GAMMAS, colorscale="Cividis", visible=visible, zmin=0, zmax=5, ncontours=18,
                contours={"showlabels": True, "labelfont": {"size": 10, "color": "#ffffff"}},
                line={"width": 0.5, "color": "rgba(255,255,255,0.5)"}, showlegend=False,
                colorbar={"title": {"text": "×"}, "len": 0.9, "thickness": 14},
                hovertemplate="α %{x:.2f}, γ %{y}: %{z:.2f}× predicted<extra></extra>",
            )  # fmt: skip
            out.add_contour(
                z=z, x=ALPHAS, y=GAMMAS, visible=visible, showscale=False, hoverinfo="skip",
                contours={"start": 1, "end": 1, "size": 1, "coloring": "none"},
                name="no gain: 1×", showlegend=True,
                line={"width": 3, "color": SOURCES["corrected"], "dash": "dash"},
            )  # fmt: skip
            out.add_scatter(
                x=ALPHAS, y=[self.best(a, c)[0] or None for a in ALPHAS], mode="lines",
                name="best γ, where one pays (predicted)",
                line={**figures.line("predicted", "#b9c2cc", 2), "shape": "hv"}, hoverinfo="skip",
                visible=visible,
            )  # fmt: skip
        alpha, gained = self.acceptance.alpha, f"{self.measured:.2f}×"
        if alpha is not None:
            out.add_scatter(
                x=[alpha], y=[self.gamma], mode="markers+text", name=f"this run: {gained} measured",
                text=[gained], textposition="top center",
                textfont={"color": "#ffffff", "size": 13},
                marker={
                    "symbol": "star", "size": 16, "color": "#ffffff", "line": {"width": 1.5, "color": "#000"},
                },
                hovertemplate=f"α {alpha:.2f}, γ {self.gamma:.1f}: {gained} measured<extra></extra>",
            )  # fmt: skip
        out.update_xaxes(range=[0, 1], showgrid=False)
        out.update_yaxes(range=[GAMMAS[0], GAMMAS[-1]], showgrid=False)
        extra = 1 if alpha is not None else 0
        steps = [
            {
                "method": "restyle",
                "args": [{"visible": [i // 3 == n for i in range(3 * len(costs))] + [True] * extra}],
                "label": f"c = {c:.3g} plain steps a drafted token" + (", as measured" if n == first else ""),
            }
            for n, c in enumerate(costs)
        ]
        slider = {
            "active": first, "steps": steps, "pad": {"t": 56}, "ticklen": 3, "tickcolor": ink["axis"],
            "currentvalue": {"prefix": "", "xanchor": "left", "font": {"size": 12, "color": ink["text"]}},
            "font": {"size": 1, "color": "rgba(0,0,0,0)"}, "bgcolor": ink["grid"],
            "bordercolor": ink["axis"], "activebgcolor": B,
        }  # fmt: skip
        legend = {"x": 0, "xanchor": "left"}
        out.update_layout(sliders=[slider], height=548, margin={"t": 84, "b": 144}, legend=legend)
        if self.rounds < self.steps:
            told = f"The surface drafts in every step; this run did in {self.rounds} of {self.steps}."
            out.add_annotation(
                text=told, xref="paper", yref="paper", x=1, y=1, xanchor="right", yanchor="bottom", yshift=26,
                showarrow=False, font={"size": 11},
            )  # fmt: skip
        return out

    def table(self) -> Table:
        """Costs of a round, tokens of a round, and the speed-up predicted and measured."""
        k, rows = self.costs, self.costs.batch * (1 + self.nodes)
        a = self.acceptance
        told: list[tuple[Any, ...]] = [
            ("a plain step", k.plain_ms, "ms", "measured"),
            ("γ, levels a draft", self.gamma, "", "measured"),
            (f"v({rows:.3g}), forward of a round", k.verify(rows), "plain steps", "measured"),
            ("γ c, drafting", k.drafting(self.gamma), "plain steps", "measured"),
            ("o, what else a round adds", k.overhead, "plain steps", "measured"),
            ("α, mean Σ min(p, q)", a.alpha, "", "measured"),
            ("tokens a round, α everywhere the same", self.iid, "", "predicted"),
            ("tokens a round, 1 + survival", self.by_survival, "", "measured"),
        ]
        if self.iid is not None and a.alpha is not None:
            gamma, gain = self.best(min(a.alpha, 1.0), self.c)
            pays = f"gains {gain:.2f}×" if gamma else "none pays"
            told += [
                ("best γ at this α and c", gamma, pays, "predicted"),
                ("speed-up, α everywhere the same", self.predicted(self.iid), "× of plain", "predicted"),
            ]
        told += [
            ("speed-up, survival and costs", self.predicted(self.by_survival), "× of plain", "predicted"),
            ("speed-up", self.measured, "× of plain", "measured"),
        ]
        drafted = f"{self.rounds} of {self.steps} decode steps had a draft"
        note = (
            f"{self.name}: {self.judged}; {drafted}. Batch {k.batch}, medians of {k.plain_steps} plain steps."
        )
        return Table.of(("", "value", "unit", "tag"), told, note=note)


def operating_point(drafted: Source, plain: Source = (), name: str = "") -> OperatingPoint:
    """Where a run stands; ``plain``: a run without a drafter, needed where every step had a draft.

    Raises :class:`RecordError` when nothing was drafted, or nothing says what a plain step costs.
    """
    steps, without = steps_of(drafted), steps_of(plain)
    records = [d for s in steps for d in s.drafts]
    if not records:
        raise RecordError("Nothing was drafted.", hint="Switch on a drafter and run a prompt.")
    costs = round_costs(steps, without)
    decodes = [s for s in steps if s.decode and not s.prefill]
    rounds = [s for s in decodes if s.draft]
    times = round_times(decodes)
    base = round_times(without)
    each = sum(t.total for t in base) / sum(t.emitted for t in base) if base else costs.plain_ms / costs.batch
    return OperatingPoint(
        name=name or (label(drafted) if isinstance(drafted, Run) else records[0].source),
        acceptance=acceptance(records),
        costs=costs,
        gamma=fmean(levels(s.drafts) for s in rounds),
        nodes=_nodes(rounds),
        chains=all(p == i - 1 for d in records for i, p in enumerate(d.parents)),
        judged=judged_by(records),
        rounds=len(rounds),
        steps=len(decodes),
        tokens=sum(t.emitted for t in times),
        ms=sum(t.total for t in times),
        plain_ms_per_token=each,
    )


def _nodes(rounds: Sequence[StepEvent]) -> float:
    return fmean(s.draft / s.decode for s in rounds)


def _of(runs: Sequence[Run]) -> OperatingPoint:
    plain = runs[0] if len(runs) > 1 and not runs[0].acceptance else ()
    return operating_point(runs[-1], plain)


def figure(runs: Sequence[Run], theme: Theme = "auto") -> Any:
    """The last run on its surface; the first, if it drafted nothing, is what it is compared with."""
    return _of(runs).figure(theme)


def table(runs: Sequence[Run]) -> Table:
    """Its costs and its speed-up."""
    return _of(runs).table()
