"""What do bytes buy? Every measured KV method by its ratio and its KL, and those that no other beats in both.

Points are runs of protocol P1 (:mod:`workbench.core.measure`): one sweep, or several methods measured on the
same windows. A bar spans the lowest and the highest window. A technique has one colour and one mark; its
points are joined where they differ in one option (:mod:`rate_curves`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from workbench.core.kv_runs import RatePoint, frontier
from workbench.spec.errors import RecordError
from workbench.spec.run import Run
from workbench.widgets import clean, figures
from workbench.widgets.kv_views.rate_curves import curves
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table

Ratio = Literal["codec", "whole"]

# The first seven stay apart for every kind of sight (Okabe and Ito); more than a whole sweep has. Marks stay
# apart without colours, and their number has no divisor in common with that of colours: no pair comes twice.
_COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a63c9", "#a08448", "#7c8796"),
    *("#c62f3e", "#2aa5a0", "#a9b52c", "#4757c4", "#f0816f", "#5d8a3c", "#e25fb4", "#8d4b2a", "#1f9ed8"),
    *("#b58ae0", "#35c27a", "#94603f"),
)
_MARKS = (
    "circle",
    "square",
    "diamond",
    "cross",
    "triangle-up",
    "x",
    "star",
    "hexagon",
    "triangle-down",
    "bowtie",
)


def draw_rates(found: Iterable[Run | RatePoint], live: RatePoint | Run | None = None) -> Rates:
    """The points of P1 runs; ``live`` is one more, drawn large: where the engine stands now.

    Raises :class:`RecordError` when nothing of it is a point.
    """
    points = tuple(p for f in found if (p := _point(f)) is not None)
    if not points:
        raise RecordError(
            "There is no point to draw.", hint='Measure some: measure.p1("tiny", "kivi:bits=2", "kv_fp8").'
        )
    return Rates(points, _point(live) if live is not None else None)


@dataclass(frozen=True)
class Rates:
    """Points of a rate-distortion plane, and perhaps the one that is live."""

    points: tuple[RatePoint, ...]
    live: RatePoint | None = None

    def figure(self, theme: Theme = "auto", ratio: Ratio = "codec") -> Any:
        """Ratio to the right, KL upwards, both on log axes: what lies low and right is better."""
        _, left_out = clean.series([p.kl for p in self.points], log=True)
        out = figures.new(
            "Bytes against quality (measured)",
            theme=theme,
            x=f"{_NAMES[ratio]}, 16-bit KV = 1 (log)",
            y="KL, nats per token (log)",
            note=clean.note(left_out, log=True),
        )
        best = frontier(self.points, whole=ratio == "whole")
        out.add_scatter(
            x=[getattr(p, ratio) for p in best], y=clean.series([p.kl for p in best], log=True)[0],
            mode="lines", name="not beaten in both", line={"color": "#767b85", "width": 1, "dash": "dot"},
            hoverinfo="skip",
        )  # fmt: skip
        for i, technique in enumerate(dict.fromkeys(p.technique for p in self.points)):
            mine = [p for p in self.points if p.technique == technique]
            colour, mark = _COLOURS[i % len(_COLOURS)], _MARKS[i % len(_MARKS)]
            self._join(out, curves(mine), technique, ratio, colour)
            self._add(out, mine, technique, ratio, colour, mark, 8)
        if self.live is not None:
            self._add(out, [self.live], f"now: {self.live.method}", ratio, "#d9822b", "star-open", 16)
        out.update_xaxes(type="log")
        out.update_yaxes(type="log", tickformat="~g")  # 0.0001, not 100µ
        out.update_layout(
            height=440,
            legend={"orientation": "v", "x": 1.02, "xanchor": "left", "y": 1, "yanchor": "top"},
        )
        return out

    def table(self) -> Table:
        """A row per point, by rising KL; which ones no other beats in both codec ratio and KL."""
        best = frontier(self.points)
        rows = [
            (p.method, p.codec, p.whole, p.kl, f"{p.spread[0]:.3g}–{p.spread[1]:.3g}", p.top1, p.change,
             "not beaten" if p in best else "", "measured")
            for p in sorted(self.points, key=lambda p: p.kl)
        ]  # fmt: skip
        columns = ("method", "codec ×", "whole ×", "KL", "windows", "top-1 %", "ΔPPL %", "", "tag")
        n = self.points[0].windows
        over = "1 window." if n == 1 else f"{n} windows, and their range."
        return Table.of(columns, rows, note=f"KL in nats per token over {over}")

    def _join(self, out: Any, joined: list[list[RatePoint]], name: str, ratio: Ratio, colour: str) -> None:
        """All lines of a technique as one trace; a gap between two of them."""
        x: list[float | None] = []
        y: list[float | None] = []
        for line in joined:
            x += [*([None] if x else []), *(getattr(p, ratio) for p in line)]
            y += [*([None] if y else []), *clean.series([p.kl for p in line], log=True)[0]]
        if x:
            out.add_scatter(
                x=x, y=y, mode="lines", line={"color": colour, "width": 1.5}, legendgroup=name,
                showlegend=False, hoverinfo="skip", connectgaps=False,
            )  # fmt: skip

    def _add(
        self, out: Any, points: list[RatePoint], name: str, ratio: Ratio, colour: str, mark: str, size: int
    ) -> None:
        kl, _ = clean.series([p.kl for p in points], log=True)
        out.add_scatter(
            x=[getattr(p, ratio) for p in points], y=kl, name=name, legendgroup=name, mode="markers",
            marker={"color": colour, "symbol": mark, "size": size},
            error_y={
                "type": "data", "symmetric": False, "thickness": 1, "width": 2, "color": colour,
                "array": [p.spread[1] - p.kl for p in points],
                "arrayminus": [p.kl - p.spread[0] for p in points],
            },
            customdata=[(p.method, p.whole, p.change, p.top1) for p in points],
            hovertemplate="%{customdata[0]}<br>%{x:.2f}×, whole cache %{customdata[1]:.2f}×<br>KL %{y:.4g}, "
            "ΔPPL %{customdata[2]:+.2f} %, top-1 %{customdata[3]:.1f} %<extra></extra>",
        )  # fmt: skip


_NAMES: dict[Ratio, str] = {"codec": "codec ratio", "whole": "ratio of the whole cache"}


def _point(found: Run | RatePoint) -> RatePoint | None:
    return found if isinstance(found, RatePoint) else RatePoint.of(found)
