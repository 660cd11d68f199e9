"""How much of what comes next is foreseen? Verdicts by the exit's layer and the candidates at each place.

Every branch is whole here, so a verdict that is not foreseen was not among the candidates. What a deeper exit
sees better it leaves less time to use: the layers behind it are all that drafting hides behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.core.placed_virtual import Reuse
from workbench.spec.errors import OptionError
from workbench.widgets import figures
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table


@dataclass(frozen=True)
class ReuseSurface:
    """``points`` of a grid of exits and candidates, of a model with ``layers`` layers."""

    points: Sequence[Reuse]
    layers: int

    def figure(self, theme: Theme = "auto") -> Any:
        """Share of verdicts foreseen, with its number in every field."""
        if not self.points:
            raise OptionError("No point was measured.", hint="Give exits and numbers of candidates.")
        exits = sorted({p.exit for p in self.points})
        kappas = sorted({p.kappa for p in self.points})
        rates = {(p.exit, p.kappa): p.rate for p in self.points}
        z = [[rates.get((e, k)) for e in exits] for k in kappas]
        text = [["" if v is None else f"{v:.0%}" for v in row] for row in z]
        hides = [[f"{1 - e / self.layers:.0%}" for e in exits] for _ in kappas]
        out = figures.new(
            "Verdicts foreseen (measured)", theme=theme,
            x="exit, layers of the target", y="candidates at each place",
        )  # fmt: skip
        out.add_heatmap(
            x=[str(e) for e in exits], y=[str(k) for k in kappas], z=z, zmin=0, zmax=1, text=text,
            texttemplate="%{text}", colorscale="Cividis", customdata=hides, xgap=2, ygap=2,
            colorbar={"title": {"text": "foreseen"}, "tickformat": ".0%", "len": 0.9, "thickness": 14},
            hovertemplate="exit behind %{x} layers, %{y} candidates: %{z:.1%} foreseen; %{customdata} of the "
            "pass is left to hide behind<extra></extra>",
        )  # fmt: skip
        out.update_xaxes(type="category", showgrid=False)
        out.update_yaxes(type="category", showgrid=False)
        return out

    def table(self) -> Table:
        """The grid, split by how many drafts were kept."""
        kept = sorted({n for p in self.points for n in p.by_accepted})
        rows = [
            (
                p.exit,
                f"{1 - p.exit / self.layers:.0%}",
                p.kappa,
                p.verdicts,
                _share(p.foreseen, p.verdicts),
                *(_share(*p.by_accepted.get(n, (0, 0))) for n in kept),
                "measured",
            )
            for p in self.points
        ]
        columns = (
            "exit", "left to hide behind", "candidates", "verdicts", "foreseen",
            *(f"{n} kept" for n in kept), "tag",
        )  # fmt: skip
        notes = dict.fromkeys(note for p in self.points for note in p.notes)  # each once
        note = "Share of verdicts whose branch was made ahead, by drafts kept."
        return Table.of(columns, rows, note=" ".join((note, *notes)))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "–"
