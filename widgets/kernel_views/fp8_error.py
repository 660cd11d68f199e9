"""What does FP8 cost, and what does incoherent processing give back? Errors of four forms, on outlier data.

Each mark is one head, measured here; open marks are the paper's numbers, which are claims: their size of the
problem is not told with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from workbench.kernels.attention.fp8_error import FORMS, FP8Errors, fp8_errors
from workbench.widgets import figures
from workbench.widgets.palette import A, B, Theme
from workbench.widgets.table import Table

#: Shah et al., arXiv 2407.08608, table of numerical errors: root mean square error by form.
CLAIMED = {FORMS[0].name: 2.4e-2, FORMS[3].name: 9.1e-3}
CLAIMED_GAIN = 2.6
_BF16 = "bf16 inputs, float64"


@dataclass(frozen=True)
class FP8Comparison:
    """Errors as measured, with their picture and table."""

    errors: FP8Errors

    @property
    def gain(self) -> float:
        """Median gain of block scales with Hadamard over per-tensor FP8."""
        return median(self.errors.gains(FORMS[3].name))

    def figure(self, theme: Theme = "auto") -> Any:
        """RMS error of each form, log axis, one mark per head."""
        e = self.errors
        out = figures.new(
            f"FP8 attention, {e.n} × {e.dim}: with both, {self.gain:.2f}× less error (measured)",
            theme=theme, x="RMS error against float64 (log)",
        )  # fmt: skip
        measured = {_BF16: e.bf16, **{name: e.by_form[name] for name in reversed([f.name for f in FORMS])}}
        for name, values in measured.items():
            out.add_scatter(
                x=list(values), y=[name] * len(values), mode="markers", name="measured here, one mark a head",
                showlegend=name == _BF16, legendgroup="measured",
                marker={**figures.marker("measured", A if name == _BF16 else B), "size": 10, "opacity": 0.75},
                hovertemplate="%{y}: %{x:.3g}<extra></extra>",
            )  # fmt: skip
        out.add_scatter(
            x=list(CLAIMED.values()), y=list(CLAIMED), mode="markers", name="claimed by the paper",
            marker={**figures.marker("claimed", "#d9822b"), "size": 12, "line": {"width": 2}},
            hovertemplate="%{y}: %{x:.3g} (claimed)<extra></extra>",
        )  # fmt: skip
        out.update_xaxes(type="log", dtick="D2")
        below = {"orientation": "h", "y": -0.3, "yanchor": "top", "x": 0, "xanchor": "left"}
        out.update_layout(height=340, margin={"l": 170}, legend=below)
        return out

    def table(self) -> Table:
        """Median error and gain with their range over heads, and the paper's."""
        rows: list[tuple[Any, ...]] = []
        for form in FORMS:
            values, gains = self.errors.by_form[form.name], self.errors.gains(form.name)
            rows.append((form.name, _spread(values, ".2e"), _spread(gains, ".2f") + "×", "measured"))
        rows.append((_BF16, _spread(self.errors.bf16, ".2e"), "–", "measured"))
        for name, value in CLAIMED.items():
            gain = CLAIMED_GAIN if name == FORMS[3].name else 1.0
            rows.append((f"{name}, paper", f"{value:.1e}", f"{gain:.1f}×", "claimed"))
        note = (
            f"{len(self.errors.bf16)} heads of {self.errors.n} tokens, head size {self.errors.dim}, entries "
            "N(0, 1) + N(0, 100) · Bernoulli(0.001); median (lowest–highest). Gain: error of per-tensor FP8 "
            "over that of the form, head by head. The arithmetic of the kernel in torch, without the tensor "
            "core's narrower accumulator."
        )
        return Table.of(("form", "RMS error", "gain", "tag"), rows, note=note)


def compare_fp8(n: int = 4096, dim: int = 128, heads: int = 3, seed: int = 0) -> FP8Comparison:
    """Measure the four forms on the CPU: about five seconds a head of 4096 tokens on two cores."""
    return FP8Comparison(fp8_errors(n, dim, heads, seed))


def _spread(values: tuple[float, ...], style: str) -> str:
    middle = format(median(values), style)
    if len(values) == 1:
        return middle
    return f"{middle} ({format(min(values), style)}–{format(max(values), style)})"
