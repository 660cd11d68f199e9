"""Where are the bytes, and when? KV memory by category over the time of one run or of several, on one scale.

Categories lie on each other in the order they have everywhere: what tokens occupy, what their slots leave
empty, what is cached for later prompts, and what the pool keeps in reserve only for the runs that name it. A
run is a panel, the first on top, so that the same bytes have the same height.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.spec.errors import RecordError
from workbench.spec.run import Run
from workbench.widgets import clean, figures, words
from workbench.widgets.palette import INKS, MEMORY, Theme
from workbench.widgets.table import Table
from workbench.widgets.views.memory import label

DRAWN = ("kv_payload", "kv_meta", "fragmentation", "draft", "kv_cached")
_HATCH = {"kv_meta": "x", "fragmentation": ".", "draft": "-", "kv_cached": "\\"}
_MIB = 1024 * 1024
MOST = 2000  # steps drawn of a run


@dataclass(frozen=True)
class ByteTime:
    """``runs`` in the order they are drawn; ``names`` say what each is."""

    runs: tuple[Run, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.runs or any(not r.steps for r in self.runs):
            raise RecordError("There are no engine steps to draw.", hint="Run a prompt first.")

    def figure(self, theme: Theme = "auto", *, same_scale: bool = True) -> Any:
        """Stacked areas in MiB over milliseconds since the first step, a panel for each run.

        ``same_scale``: equal bytes have equal heights; otherwise each panel fills its own.
        """
        n = len(self.runs)
        out = figures.new("KV memory by category, step by step (measured)", theme=theme)
        out.set_subplots(
            rows=n,
            cols=1,
            shared_xaxes=True,
            shared_yaxes="all" if same_scale else False,
            vertical_spacing=0.16 / n,
        )
        seen: set[str] = set()
        left_out = 0
        for row, (run, name) in enumerate(zip(self.runs, self.names, strict=True), 1):
            stride = -(-len(run.steps) // MOST)
            steps = run.steps[::stride]
            times = _milliseconds(steps)
            for key, title, colour in MEMORY:
                values, missing = clean.series([_held(s).get(key, 0) / _MIB for s in steps])
                left_out += missing
                if key not in DRAWN or not any(values):
                    continue
                pattern = {"shape": _HATCH.get(key, ""), "fgcolor": colour, "size": 6, "solidity": 0.3}
                out.add_scatter(
                    x=times, y=values, name=title, legendgroup=key, showlegend=key not in seen,
                    stackgroup=f"kv{row}", mode="lines", line={"color": colour, "width": 1, "shape": "hv"},
                    fillpattern=pattern if key in _HATCH else None, row=row, col=1,
                    hovertemplate=f"{title}: %{{y:.3g}} MiB at %{{x:.3g}} ms<extra>{name}</extra>",
                )  # fmt: skip
                seen.add(key)
            out.add_annotation(
                text=name, x=0.005, y=1, xref="x domain" if row == 1 else f"x{row} domain",
                yref="y domain" if row == 1 else f"y{row} domain", showarrow=False, xanchor="left",
                yanchor="bottom", font={"size": 12},
            )  # fmt: skip
        self._style(out, theme)
        if left_out:
            figures.add_note(out, clean.note(left_out))
        return out

    def table(self) -> Table:
        """Bytes by category of each run: mean over its time, and at its fullest step."""
        rows = []
        for run, name in zip(self.runs, self.names, strict=True):
            times = _milliseconds(run.steps)
            for key, title, _ in MEMORY:
                held = [_held(s).get(key, 0) for s in run.steps]
                if key in DRAWN and any(held):
                    fullest = words.size(run.memory.get(key, 0))
                    rows.append((name, title, words.size(_mean(held, times)), fullest, "measured"))
            in_use = [float(words.kv_in_use(_held(s))) for s in run.steps]
            peak = words.size(words.kv_in_use(run.memory))
            rows.append((name, "KV in use", words.size(_mean(in_use, times)), peak, "measured"))
        note = "Storages really held. KV in use: payload, metadata and fragmentation, not what is cached."
        return Table.of(("run", "category", "mean over time", "at the fullest step", "tag"), rows, note=note)

    def _style(self, out: Any, theme: Theme) -> None:
        out.update_xaxes(rangemode="tozero")
        out.update_yaxes(title={"text": "MiB"}, rangemode="tozero")
        out.update_xaxes(title={"text": "ms since the first step"}, row=len(self.runs), col=1)
        out.update_layout(
            height=142 + 150 * len(self.runs), margin={"t": 96}, font={"color": INKS[theme]["text"]}
        )
        out.update_layout(legend={"y": 1.0, "yanchor": "bottom", "yref": "container", "x": 1})
        out.update_layout(legend={"y": 1 - 72 / out.layout.height})


def draw_bytes(*runs: Run, names: Sequence[str] = ()) -> ByteTime:
    """The bytes of runs, each named by its recipe unless ``names`` are given.

    Raises :class:`RecordError` without runs or steps, or for another number of names than runs.
    """
    if names and len(names) != len(runs):
        raise RecordError(f"{len(names)} names were given for {len(runs)} runs.")
    return ByteTime(runs, tuple(names) or tuple(label(r) for r in runs))


def _held(step: Any) -> dict[str, int]:
    """Bytes of a step: just before what ended in it gave its pages back, if something did."""
    return dict(step.get("peak") or step.get("bytes", {}))


def _milliseconds(steps: Sequence[Any]) -> list[float]:
    """When each step ended, counted from the start of the first."""
    start = steps[0]["time"]
    return [1e3 * (s["time"] - start) + sum(s.get("phase_ms", {}).values()) for s in steps]


def _mean(held: Sequence[float], times: Sequence[float]) -> float:
    """Over time: each step's bytes count for as long as the step lasted."""
    spans = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    total = sum(spans)
    return sum(h * t for h, t in zip(held, spans, strict=True)) / total if total > 0 else float(held[-1])
