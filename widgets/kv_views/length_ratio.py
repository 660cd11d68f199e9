"""What does a codec's ratio become of a whole cache? Sinks and a window stay in 16 bits, so length decides.

    whole(N) = N / (C / codec + N - C)      with C = N - w - s, in whole chunks of 16 tokens

for ``s`` sinks, a window of ``w`` and the codec's ratio: predicted as a line, measured as marks, from real
payloads. At 1,024 tokens and a window of 128 no codec reaches 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.kv.cached import CachedRows
from workbench.kv.cachegen.context import cut
from workbench.kv.kvtc.account import Account, account
from workbench.kv.kvtc.header import CHUNK
from workbench.spec.errors import OptionError
from workbench.widgets import figures
from workbench.widgets.kv_views.format_error import LINES
from workbench.widgets.kv_views.spectrum import Spectrum
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table

WINDOWS = (128, 16)
SINKS = 4


@dataclass(frozen=True)
class LengthRatio:
    """``accounts[ratio, window]``: of payloads of growing length; ``ratio`` is that before entropy coding."""

    model: str
    accounts: dict[tuple[float, int], tuple[Account, ...]]

    def predicted(self, ratio: float, window: int, tokens: float) -> float:
        """The whole ratio that the formula gives, with the codec ratio of the longest payload."""
        codec = self.accounts[ratio, window][-1].codec_ratio or 1.0
        coded = max(tokens - window - SINKS, 0) // CHUNK * CHUNK
        return tokens / (coded / codec + tokens - coded)

    def figure(self, theme: Theme = "auto") -> Any:
        """Whole ratio by length: long dashes predicted, marks measured."""
        out = figures.new(
            f"From the codec's ratio to the cache's: KVTC on {self.model}", theme=theme,
            x="tokens in the cache (log)", y="16-bit bytes over all bytes",
        )  # fmt: skip
        for i, ((ratio, window), found) in enumerate(self.accounts.items()):
            colour, symbol = LINES[i % len(LINES)]
            name = f"{ratio:g}×, window {window}"
            lengths = [found[0].tokens * 2 ** (n / 4) for n in range(33)]
            out.add_scatter(
                x=lengths, y=[self.predicted(ratio, window, n) for n in lengths], mode="lines", name=name,
                legendgroup=name, line=figures.line("predicted", colour, 1.5),
                hovertemplate=f"{name}, %{{x:,.0f}} tokens: %{{y:.2f}}× predicted<extra></extra>",
            )  # fmt: skip
            out.add_scatter(
                x=[a.tokens for a in found], y=[a.whole_ratio for a in found], mode="markers", name=name,
                legendgroup=name, showlegend=False, marker={"color": colour, "symbol": symbol, "size": 8},
                hovertemplate=f"{name}, %{{x:,}} tokens: %{{y:.2f}}× measured<extra></extra>",
            )  # fmt: skip
        out.update_xaxes(type="log")
        out.update_yaxes(rangemode="tozero")
        out.update_layout(height=380)
        return out

    def table(self) -> Table:
        """Codec ratio and whole ratio of every payload."""
        rows = [
            (f"{ratio:g}×", window, a.tokens, a.codec_ratio, a.whole_ratio,
             self.predicted(ratio, window, a.tokens), "measured")
            for (ratio, window), found in self.accounts.items()
            for a in found
        ]  # fmt: skip
        columns = ("planned", "window", "tokens", "codec ×", "whole ×", "predicted whole ×", "tag")
        note = "Bytes of real payloads over 16-bit KV, headers and what stays exact included, the basis not."
        return Table.of(columns, rows, note=note)


def ratios_by_length(
    spectrum: Spectrum,
    rows: CachedRows,
    ratios: Sequence[float] = (8.0, 16.0),
    lengths: Sequence[int] = (256, 512, 1024),
) -> LengthRatio:
    """Encode the first ``lengths`` of ``rows`` with every planned ratio and two windows.

    Raises :class:`OptionError` for a ratio that ``spectrum`` has no plan for, and when no length is left.
    """
    usable = sorted({n for n in lengths if n <= rows.tokens and n > max(WINDOWS) + SINKS + 16})
    if not usable:
        raise OptionError(
            f"{rows.tokens} rows are too few.",
            hint=f"More than {max(WINDOWS) + SINKS + 16} are coded at all.",
        )
    found = {}
    for ratio in ratios:
        for window in WINDOWS:
            codec = spectrum.codec(ratio, sinks=SINKS, window=window)
            found[ratio, window] = tuple(account(codec, codec.encode(cut(rows, 0, n))) for n in usable)
    return LengthRatio(spectrum.model, found)
