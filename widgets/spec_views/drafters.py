"""Which drafter pays here? Every drafter of the catalogue on one prompt, all costs in, beside plain decoding.

Runs take turns, a plain one in every turn, so that a slow moment slows all; each turn gives one ratio per
drafter. What a drafter gains is wall-clock, everything included; what its acceptance and its costs predict
stands beside it. A drafter that cannot run here says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from workbench.core import catalog
from workbench.core.plan import why_not
from workbench.spec.errors import RecordError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run
from workbench.widgets import figures, words
from workbench.widgets.palette import INKS, SOURCES, Theme
from workbench.widgets.spec_views.badge import badge
from workbench.widgets.spec_views.speedup import OperatingPoint, operating_point
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.session import Session

BASE = "paged"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a63c9", "#a08448", "#7c8796")
_MARKS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star", "hexagon", "triangle-down")


@dataclass(frozen=True)
class DraftersHere:
    """Drafters that can run on a session's model, and what stands against the others."""

    usable: tuple[str, ...]
    against: Mapping[str, str]

    def table(self) -> Table:
        """A row per drafter of the catalogue: its badge, what it does, and whether it can run."""
        rows = []
        for name in (*self.usable, *self.against):
            spec = catalog.get(name).spec
            here = "yes" if name in self.usable else self.against[name]
            kind = badge(spec.kind).replace(" ", "\u00a0")  # stays in one line beside long summaries
            rows.append((spec.title, kind, spec.summary, here))
        return Table.of(("drafter", "badge", "what it does", "runs here"), rows)


def drafters_here(session: Session) -> DraftersHere:
    """Every technique of the catalogue that drafts, asked whether it fits the session's model."""
    usable, against = [], {}
    where = {"dtype": session.plan.dtype, "device": session.plan.device, "numerics": session.plan.numerics}
    for technique in catalog.all_techniques():
        if technique.spec.seam == "drafter":
            conflicts = why_not(Recipe.of(BASE), technique.id, session.facts, **where)
            if conflicts:
                against[technique.id] = conflicts[0].remedy
            else:
                usable.append(technique.id)
    return DraftersHere(tuple(usable), against)


@dataclass(frozen=True)
class Compared:
    """Runs of plain decoding and of recipes with a drafter, turn by turn; ``title`` says on what."""

    title: str
    plain: tuple[Run, ...]
    drafted: Mapping[str, tuple[Run, ...]]

    def gains(self, name: str) -> list[float]:
        """Plain time per output token over the recipe's, one per turn."""
        pairs = zip(self.plain, self.drafted[name], strict=True)
        return [_ms(a) / _ms(b) for a, b in pairs]

    def first_token(self, name: str) -> list[float]:
        """The recipe's time to the first token over the plain one, one per turn."""
        pairs = zip(self.plain, self.drafted[name], strict=True)
        return [_ms(b, "ttft") / _ms(a, "ttft") for a, b in pairs]

    def point(self, name: str) -> OperatingPoint | None:
        """Where a recipe stands, by the turn whose gain is in the middle; None where it drafted nothing."""
        gains = self.gains(name)
        turn = sorted(range(len(gains)), key=gains.__getitem__)[len(gains) // 2]
        try:
            return operating_point(self.drafted[name][turn], self.plain[turn], name)
        except RecordError:
            return None

    def figure(self, theme: Theme = "auto") -> Any:
        """Speed-up of every recipe: bars measured, open diamonds predicted, the line is plain decoding."""
        out = figures.new(
            f"Speed-up, everything included: {self.title}", theme=theme, x="× of plain decoding"
        )
        names = list(self.drafted)
        spread = [self.gains(n) for n in names]
        middle = [median(g) for g in spread]
        out.add_bar(
            x=middle, y=names, orientation="h", name="measured", width=0.6,
            marker={"color": SOURCES["accepted"]},
            error_x={
                "type": "data", "symmetric": False, "color": INKS[theme]["text"], "thickness": 1, "width": 3,
                "array": [max(g) - m for g, m in zip(spread, middle, strict=True)],
                "arrayminus": [m - min(g) for g, m in zip(spread, middle, strict=True)],
            },
            hovertemplate="%{y}: %{x:.2f}× measured<extra></extra>",
        )  # fmt: skip
        told = [(n, p.predicted(p.by_survival)) for n in names if (p := self.point(n)) is not None]
        out.add_scatter(
            x=[v for _, v in told], y=[n for n, _ in told], mode="markers", name="predicted from costs",
            marker={
                "symbol": "diamond-open", "size": 11, "color": SOURCES["corrected"], "line": {"width": 2},
            },
            hovertemplate="%{y}: %{x:.2f}× predicted<extra></extra>",
        )  # fmt: skip
        out.add_vline(x=1, line={"color": INKS[theme]["text"], "width": 1})
        out.update_yaxes(autorange="reversed")
        out.update_xaxes(rangemode="tozero")
        left = 24 + 7 * max(map(len, names), default=10)
        out.update_layout(height=130 + 34 * len(names), margin={"l": left, "t": 72})
        return out

    def figure_acceptance(self, theme: Theme = "auto") -> Any:
        """Share of drafts that kept each position, a line per recipe."""
        title = f"Acceptance by draft position: {self.title} (measured)"
        out = figures.new(title, theme=theme, x="draft position", y="share of drafts")
        for i, (name, runs) in enumerate(self.drafted.items()):
            survival = list(runs[-1].acceptance.get("survival", ()))
            last = next((j for j, s in enumerate(survival) if not s), len(survival)) + 1
            out.add_scatter(
                x=list(range(1, last + 1)), y=survival[:last], mode="lines+markers", name=name,
                line={"color": _COLOURS[i % len(_COLOURS)], "width": 2},
                marker={"symbol": _MARKS[i % len(_MARKS)], "size": 8},
                hovertemplate=f"{name}, position %{{x}}: %{{y:.0%}}<extra></extra>",
            )  # fmt: skip
        out.update_yaxes(range=[0, 1.04], tickformat=".0%")
        out.update_xaxes(dtick=1)
        legend = {"orientation": "v", "x": 1.02, "xanchor": "left", "y": 1, "yanchor": "top"}
        out.update_layout(legend=legend, height=340)
        return out

    def table(self) -> Table:
        """A row per recipe: acceptance, costs in plain steps, speed-up predicted and measured, badge."""
        rows: list[tuple[Any, ...]] = []
        for name, runs in self.drafted.items():
            p, a, gains = self.point(name), runs[-1].acceptance, self.gains(name)
            same = words.text_agreement(self.plain[-1].token_ids, runs[-1].token_ids)
            costs: tuple[Any, ...] = (None,) * 4
            if p is not None:
                forward = p.costs.verify(p.costs.batch * (1 + p.nodes))
                said = f"{p.predicted(p.by_survival):.2f}×"
                costs = (forward, p.costs.drafting(p.gamma), p.costs.overhead, said)
            told = f"{median(gains):.2f}×"
            told += f" ({min(gains):.2f}–{max(gains):.2f})" if len(gains) > 1 else ""
            accepted = (a.get("tau"), a.get("tokens_per_forward"), a.get("alpha"))
            kind = runs[-1].plan.get("kind", "exact")
            rows.append((name, badge(kind), *accepted, *costs, told, same, "measured"))
        columns = (
            "recipe", "badge", "τ", "tokens a forward", "α", "v", "γ c", "o", "predicted", "speed-up", "text",
            "tag",
        )  # fmt: skip
        turns = f"{len(self.plain)} {'turn' if len(self.plain) == 1 else 'turns'}"
        note = (
            f"{turns}; speed-up: plain time per output token over the recipe's, with range. "
            "v, γ c and o: forward, drafting and all else of a round, in plain steps."
        )
        return Table.of(columns, rows, note=note)


def compare_drafters(
    session: Session,
    prompt: Any,
    recipes: Iterable[str | Sequence[str]],
    *,
    title: str = "",
    repeats: int = 3,
    **sampling: Any,
) -> Compared:
    """Run plain decoding and every recipe in turn, ``repeats`` times behind a turn to warm up.

    A recipe is a drafter as text (``"ngram:k=4"``) or several techniques; pages are always on. ``sampling``
    as in :meth:`Session.generate`. The session's recipe is put back.
    """
    named = {
        " + ".join([r] if isinstance(r, str) else r): [r] if isinstance(r, str) else list(r) for r in recipes
    }
    before = session.recipe
    plain: list[Run] = []
    drafted: dict[str, list[Run]] = {name: [] for name in named}
    try:
        for turn in range(repeats + 1 if repeats > 1 else 1):
            keep = turn or repeats == 1
            runs = [("", _generate(session, (), prompt, sampling))]
            runs += [(name, _generate(session, uses, prompt, sampling)) for name, uses in named.items()]
            if keep:
                plain.append(runs[0][1])
                for name, run in runs[1:]:
                    drafted[name].append(run)
    finally:
        session.apply(before).result()
    where = f"{title}, {session.plan.model}" if title else session.plan.model
    return Compared(where, tuple(plain), {name: tuple(runs) for name, runs in drafted.items()})


def _generate(session: Session, uses: Sequence[str], prompt: Any, sampling: Mapping[str, Any]) -> Run:
    session.apply(Recipe.of(BASE, *uses)).result()
    return session.generate(prompt, **sampling)


def _ms(run: Run, of: str = "tpot") -> float:
    metric = run.metric(of)
    if metric is None or metric.value <= 0:
        raise RecordError(f"A run has no {of}.", hint="Ask for two tokens or more.")
    return metric.value
