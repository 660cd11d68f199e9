"""What does FlashAttention keep while it walks? One real attention row, tile by tile, with a slider.

Above: the scores of the row; those of the current tile in colour, those not read yet pale, and the running
maximum as a line. Below: the running output o / l beside the final one. The slider is plotly's own, so that
it also works on an exported page; the figure opens at its last step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.attention.tile_walk import LOG2_E, TileStep, scores, walk
from workbench.widgets import figures
from workbench.widgets.kernel_views.row import Row
from workbench.widgets.palette import INKS, B, Theme
from workbench.widgets.table import Table

_DONE, _LATER, _TOP = "#12908e", "rgba(128,134,142,0.38)", "#d9822b"


@dataclass(frozen=True)
class TileWalk:
    """The steps of a walk over ``row`` in tiles of ``tile`` keys, and attention computed in one piece."""

    row: Row
    tile: int
    steps: tuple[TileStep, ...]
    scores: Tensor
    exact: Tensor

    def distance(self, step: int) -> float:
        """Relative error of the running output after a step, against attention over all keys."""
        return float((self.steps[step].normalised - self.exact).norm() / self.exact.norm())

    def words(self, step: int) -> str:
        """One line about a step."""
        at = self.steps[step]
        first = step == 0
        change = "the first tile" if first else f"earlier sums × {at.rescaled:.3g}"
        return (
            f"tile {step + 1} of {len(self.steps)}, keys {at.first} to {at.end - 1}: {change}, "
            f"m = {at.top:.2f}, l = {at.total:.3g}, output off by {self.distance(step):.2g}"
        )

    def figure(self, theme: Theme = "auto") -> Any:
        """Scores and running output of every step; the slider chooses which is seen."""
        out = figures.new(f"Tile walk of one row: {self.row.where} (measured)", theme=theme)
        out.set_subplots(rows=2, cols=1, row_heights=[0.58, 0.42], vertical_spacing=0.2)
        each = 0
        for number in range(len(self.steps)):
            traces = self._traces(number)
            each = len(traces)
            for trace, row in traces:
                out.add_trace({**trace, "visible": number == len(self.steps) - 1}, row=row, col=1)
        self._axes(out)
        out.update_layout(
            height=540,
            margin={"b": 40},
            bargap=0.15,
            sliders=[self._slider(each, INKS[theme])],
            legend={"y": 1.02, "x": 1},
        )
        return out

    def table(self) -> Table:
        """One row per tile: what is kept between tiles."""
        rows = [
            (i + 1, f"{s.first}–{s.end - 1}", s.top, s.rescaled if i else None, s.total, self.distance(i))
            for i, s in enumerate(self.steps)
        ]
        lse = self.steps[-1].top / LOG2_E + float(
            torch.tensor(self.steps[-1].total, dtype=torch.float64).log()
        )
        columns = ("step", "keys", "running max m (log2)", "earlier sums ×", "running sum l", "output off by")
        note = (
            f"Measured in float64 on {self.row.where}, row of token {len(self.row.tokens) - 1}. "
            f"LSE = (m + log2 l) ln 2 = {lse:.6g}. Between tiles {len(self.exact)} + 2 numbers are kept; "
            f"a score matrix has {len(self.scores)} per row."
        )
        return Table.of(columns, rows, note=note)

    def _traces(self, number: int) -> list[tuple[dict[str, Any], int]]:
        at, n = self.steps[number], len(self.scores)
        read = torch.zeros(n, dtype=torch.bool)
        for step in self.steps[: number + 1]:
            read[step.first : step.end] = True
        now = torch.zeros(n, dtype=torch.bool)
        now[at.first : at.end] = True
        groups = (
            ("not read yet", ~read, _LATER, "circle-open"),
            ("read", read & ~now, _DONE, "circle"),
            ("this tile", now, B, "diamond"),
        )
        traces: list[tuple[dict[str, Any], int]] = []
        for name, mask, colour, symbol in groups:
            keys = mask.nonzero()[:, 0].tolist()
            marks = {"color": colour, "size": 7 if name == "this tile" else 5, "symbol": symbol}
            traces.append(
                (
                    {
                        "type": "scatter", "mode": "markers", "name": name, "x": keys, "marker": marks,
                        "y": [round(float(self.scores[i]), 4) for i in keys],
                        "customdata": [self.row.tokens[i] for i in keys],
                        "hovertemplate": "key %{x} %{customdata!r}: %{y:.3g}<extra></extra>",
                    },
                    1,
                )
            )  # fmt: skip
        end = {"x": [0, n - 1], "y": [round(at.top, 4)] * 2, "mode": "lines", "name": "running max m"}
        traces.append(({"type": "scatter", **end, "line": figures.line("measured", _TOP)}, 1))
        dims = list(range(len(self.exact)))
        for name, values, style in (
            ("output so far", at.normalised, {"type": "bar", "marker": {"color": B}}),
            (
                "attention over all keys",
                self.exact,
                {
                    "type": "scatter",
                    "mode": "markers",
                    "marker": {"color": _TOP, "symbol": "line-ew-open", "size": 8},
                },
            ),
        ):
            y = [round(float(v), 5) for v in values]
            traces.append(({"x": dims, "y": y, "name": name, **style}, 2))
        return traces

    def _slider(self, each: int, ink: dict[str, str]) -> dict[str, Any]:
        steps = []
        for number in range(len(self.steps)):
            visible = [i // each == number for i in range(each * len(self.steps))]
            steps.append({"method": "restyle", "args": [{"visible": visible}], "label": self.words(number)})
        return {
            "active": len(self.steps) - 1,
            "steps": steps,
            "currentvalue": {"prefix": "", "xanchor": "left", "font": {"size": 12, "color": ink["text"]}},
            "font": {"size": 1, "color": "rgba(0,0,0,0)"},
            "pad": {"t": 52},
            "ticklen": 3,
            "tickcolor": ink["axis"],
            "bgcolor": ink["grid"],
            "bordercolor": ink["axis"],
            "activebgcolor": B,
        }

    def _axes(self, out: Any) -> None:
        """Titles of both rows."""
        for row, x, y in ((1, "key", "score (log2)"), (2, "dimension of the head", "output")):
            out.update_xaxes(zeroline=False, title={"text": x}, row=row, col=1)
            out.update_yaxes(title={"text": y}, row=row, col=1)


def walk_row(row: Row, tile: int = 32, *, last_first: bool = True) -> TileWalk:
    """Walk a row; the last tile first, as the kernel does, or the first tile first."""
    steps = walk(row.q, row.k, row.v, tile, last_first=last_first)
    s = scores(row.q, row.k)
    exact = torch.softmax(s / LOG2_E, 0) @ row.v.double()
    return TileWalk(row, tile, tuple(steps), s, exact)
