"""Which wall is hit? Operations per byte of every kernel case, the roofs of the chip, goals and measurements.

Operations and bytes are counted from the problem (predicted). Roofs are the vendor's data sheet of the H200
(claimed) until a report of ``workbench gpu-check`` is given; then roofs and points are what it measured.
Goals are bands from *must* to *stretch*: marks to reach, not results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.kernels.bench import record, roofline
from workbench.kernels.bench.files import RESULTS
from workbench.spec.errors import RecordError
from workbench.widgets import figures
from workbench.widgets.palette import INKS, Theme
from workbench.widgets.table import Table

#: Kernel files drawn by default: one of each kind.
SHOWN = ("fa3_fwd", "fa3_fwd_fp8", "paged_decode", "w4a16", "gemm_fp8_block", "moe_grouped")
_COLOURS = ("#2f7fd1", "#8a63c9", "#12908e", "#d9822b", "#a08448", "#c8443c", "#7c8796")
_UNITS = {"bf16": "16-bit products", "fp8": "FP8 products", "int8": "INT8 products"}


@dataclass(frozen=True)
class Roofline:
    """Rows of timed cases as `bench.record` has them, the ceilings over them, and whose ceilings they are."""

    rows: tuple[Mapping[str, Any], ...]
    ceilings: roofline.Ceilings
    device: str

    @property
    def tag(self) -> str:
        """Whether the roofs were measured or are claimed."""
        return "measured" if self.ceilings.measured else "claimed"

    def figure(self, theme: Theme = "auto") -> Any:
        """Log-log: a band per goal, an open mark at its target, a solid mark where it was measured."""
        out = figures.new(
            f"Roofs of {self.device} ({self.tag}), goals and measurements",
            theme=theme, x="operations per byte that must move (log)", y="TFLOP/s (log)",
        )  # fmt: skip
        self._roofs(out, INKS[theme]["text"])
        kernels = list(dict.fromkeys(r["kernel"] for r in self.rows))
        for kernel, colour in zip(kernels, _cycled(len(kernels)), strict=True):
            mine = [r for r in self.rows if r["kernel"] == kernel]
            goals = [(r, g) for r in mine for g in r["goals"] if g["of"] == ""]
            for row, goal in goals:
                low, high = (_flops_rate(row, goal[mark]) for mark in ("must", "stretch"))
                out.add_scatter(
                    x=[_intensity(row)] * 2, y=[low, high], mode="lines", showlegend=False, hoverinfo="skip",
                    line={"color": colour, "width": 7}, opacity=0.35, legendgroup=kernel,
                )  # fmt: skip
            self._marks(out, [(r, _flops_rate(r, g["target"])) for r, g in goals], kernel, colour, "target")
            done = [(r, r["flops"] / r["seconds"] / 1e12) for r in mine if r.get("seconds")]
            self._marks(out, done, kernel, colour, "measured")
        out.update_xaxes(type="log", dtick=1)
        out.update_yaxes(type="log", dtick=1)
        below = {"orientation": "h", "y": -0.2, "yanchor": "top", "x": 0, "xanchor": "left"}
        out.update_layout(height=460, legend=below)
        return out

    def shares(self, theme: Theme = "auto") -> Any:
        """The same as shares of the roof over each case: goal bands, targets, measurements."""
        rows = [r for r in self.rows if r.get("seconds") or any(g["of"] == "" for g in r["goals"])]
        out = figures.new(
            f"Share of the {self.tag} roof: goals and measurements", theme=theme, x="share of the roof"
        )
        drawn: dict[str, tuple[list[float], list[str]]] = {"target": ([], []), "measured": ([], [])}
        for row in rows:
            roof = row["flops"] / self._floor(row) / 1e12
            for goal in (g for g in row["goals"] if g["of"] == ""):
                must, target, stretch = (
                    _flops_rate(row, goal[m]) / roof for m in ("must", "target", "stretch")
                )
                out.add_scatter(
                    x=[must, stretch], y=[row["key"]] * 2, mode="lines", showlegend=False, hoverinfo="skip",
                    line={"color": _COLOURS[0], "width": 9}, opacity=0.3,
                )  # fmt: skip
                drawn["target"][0].append(target)
                drawn["target"][1].append(row["key"])
            if row.get("seconds"):
                drawn["measured"][0].append(self._floor(row) / row["seconds"])
                drawn["measured"][1].append(row["key"])
        for name, (x, y) in drawn.items():
            mark = figures.marker("claimed" if name == "target" else "measured", _COLOURS[0])
            told = "target, band from must to stretch" if name == "target" else "measured"
            if x:
                out.add_scatter(
                    x=x, y=y, mode="markers", name=told, marker={**mark, "size": 10},
                    hovertemplate="%{y}: %{x:.0%}<extra></extra>",
                )  # fmt: skip
        out.update_xaxes(range=[0, 1.02], tickformat=".0%")
        out.update_yaxes(categoryorder="array", categoryarray=[r["key"] for r in reversed(rows)])
        out.update_layout(height=154 + 26 * len(rows), margin={"l": 260})
        return out

    def table(self) -> Table:
        """Each case: what bounds it, its floor under the roofs, its goals, and what was measured."""
        rows = []
        for r in self.rows:
            unit = "TB/s" if r["bound"] == "bytes" else "TFLOP/s"
            goal = next((g for g in r["goals"] if g["of"] == ""), None)
            marks = f"{goal['must']:g} / {goal['target']:g} / {goal['stretch']:g} {unit}" if goal else "–"
            measured = f"{r['rate']:.3g} {r['rate_unit']}" if r.get("rate") else "–"
            floor = 1e3 * self._floor(r)
            rows.append((r["key"], r["bound"], _intensity(r), floor, marks, measured))
        columns = (
            "case", "bound by", "operations per byte (predicted)", f"floor, ms ({self.tag} roofs)",
            "goals: must / target / stretch", "measured",
        )  # fmt: skip
        note = "Goals are marks to reach. " + (
            f"Measured on {self.device}."
            if self.ceilings.measured
            else "Nothing here was measured yet: run `workbench gpu-check` on a Hopper GPU, give its report."
        )
        return Table.of(columns, rows, note=note)

    def _floor(self, row: Mapping[str, Any]) -> float:
        rates = (("bytes", row["bytes"]), (row["unit"], row["flops"]))
        return float(max(work / self.ceilings.of(name) for name, work in rates if self.ceilings.of(name)))

    def _roofs(self, out: Any, ink: str) -> None:
        xs = [_intensity(r) for r in self.rows]
        low, high = min(xs) / 3, max(xs) * 3
        style = {"width": 1.5, "dash": "solid" if self.ceilings.measured else "longdash", "color": ink}
        slope = self.ceilings.of("bytes") / 1e12
        for unit in dict.fromkeys(r["unit"] for r in self.rows):
            top = self.ceilings.of(unit) / 1e12
            if not top or not slope:
                continue
            ridge = min(max(top / slope, low), high)
            xs = [low, ridge, high]
            out.add_scatter(
                x=xs, y=[min(x * slope, top) for x in xs], mode="lines", line=style, hoverinfo="name",
                name=f"{_UNITS[unit]}: {top:.0f} TFLOP/s, {slope:.2g} TB/s",
            )  # fmt: skip

    def _marks(
        self, out: Any, points: Sequence[tuple[Mapping[str, Any], float]], kernel: str, colour: str, what: str
    ) -> None:
        if not points:
            return
        mark = figures.marker("claimed" if what == "target" else "measured", colour)
        out.add_scatter(
            x=[_intensity(r) for r, _ in points], y=[y for _, y in points], mode="markers",
            name=f"{kernel}: {what}", legendgroup=kernel, marker={**mark, "size": 10},
            customdata=[f"{r['key']}<br>{what}: {y:.3g} TFLOP/s" for r, y in points],
            hovertemplate="%{customdata}<extra></extra>",
        )  # fmt: skip


def draw_roofline(report: str | Path = "", kernels: Sequence[str] = SHOWN) -> Roofline:
    """The timed cases with goals of some kernel files; with a gpu-check ``report``, what it measured.

    ``report`` is a folder of ``workbench gpu-check`` or its ``results.json``. Raises ``RecordError`` for a
    report that cannot be read or has none of these kernels, ``MissingExtra`` without triton and report.
    """
    if str(report):
        found = _read(Path(report))
        rows, ceilings = found["cases"], record.ceilings_of(found["ceilings"])
        device = str(found["device"].get("name") or "the GPU of the report")
        if not ceilings.of("bytes"):
            ceilings = roofline.CLAIMED
    else:
        from workbench.kernels.bench import roster

        present = [name for name in kernels if name in roster.covered()]
        rows = [record.row_of(case) for case in roster.chosen(present) if case.timed]
        ceilings, device = roofline.CLAIMED, "an H200 SXM"
    wanted = [
        r
        for r in rows
        if r["kernel"] in kernels
        and r["flops"]
        and r["bytes"]
        and ((r["timed"] and r["goals"]) or r.get("seconds"))
    ]
    if not wanted:
        raise RecordError(
            f"No timed case of {', '.join(kernels)} to draw.",
            hint="Name kernels that `workbench gpu-check` times.",
        )
    return Roofline(tuple(wanted), ceilings, device)


def _read(path: Path) -> dict[str, Any]:
    file = path / RESULTS if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"{file} is no report of gpu-check: {error}.", hint="Give the folder that its --out named."
        ) from None
    keys = {"schema", "cases", "ceilings", "device"}
    if not isinstance(found, dict) or not keys <= set(found) or found["schema"] != record.SCHEMA:
        raise RecordError(
            f"{file} is no report of this gpu-check.", hint=f"It reads schema {record.SCHEMA}: measure again."
        )
    return found


def _intensity(row: Mapping[str, Any]) -> float:
    return float(row["flops"]) / float(row["bytes"])


def _flops_rate(row: Mapping[str, Any], value: float) -> float:
    """A goal's number as TFLOP/s: TB/s times operations per byte where bytes set the bound."""
    return value * _intensity(row) if row["bound"] == "bytes" else value


def _cycled(n: int) -> list[str]:
    return [_COLOURS[i % len(_COLOURS)] for i in range(n)]
