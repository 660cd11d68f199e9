"""What a KV format does to keys and values: error layer by layer, against the bits it really takes.

Signal over error in decibel, 6.02 to a bit: rows of a real text are coded and decoded as in the cache. The
first tokens are left out, because they are unlike all others, and so are pages that a format keeps exact
until they are full. What the error does to text is another question: protocol P1 answers it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.core.build_kv import kv_codec
from workbench.core.quality import quality_plans
from workbench.core.quality_windows import QualitySettings
from workbench.kv.cached import CachedRows, RoundTrip, page_format
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe
from workbench.widgets import clean, figures
from workbench.widgets.kv_views.cache_rows import SINKS
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine

#: One colour and one mark per line, in this order; readable without telling the colours apart.
LINES = (
    ("#2f7fd1", "circle"), ("#d9822b", "square"), ("#12908e", "diamond"), ("#8a63c9", "triangle-up"),
    ("#7c8796", "x"), ("#a08448", "star"), ("#c8443c", "cross"), ("#4a5ab0", "triangle-down"),
)  # fmt: skip


@dataclass(frozen=True)
class FormatErrors:
    """``sqnr[name]`` is (keys, values): decibel per layer; ``bits`` per element, scales counted."""

    sqnr: dict[str, tuple[tuple[float, ...], tuple[float, ...]]]
    bits: dict[str, float]
    tokens: int

    def figure(self, theme: Theme = "auto") -> Any:
        """Decibel by layer, keys on the left and values on the right; higher is better."""
        out = figures.new("What each format keeps of keys and values (measured)", theme=theme)
        out.set_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.05)
        left_out = 0
        for (name, sides), (colour, symbol) in zip(self.sqnr.items(), _lines(len(self.sqnr)), strict=True):
            for col, side in enumerate(sides, 1):
                values, missing = clean.series(side)
                left_out += missing
                out.add_scatter(
                    x=list(range(len(values))), y=values, mode="lines+markers", name=name, legendgroup=name,
                    showlegend=col == 1, line=figures.line("measured", colour, 1.5), row=1, col=col,
                    marker={"color": colour, "symbol": symbol, "size": 7},
                    hovertemplate=f"{name}, layer %{{x}}: %{{y:.3g}} dB<extra></extra>",
                )  # fmt: skip
        for col, name in ((1, "keys"), (2, "values")):
            out.update_xaxes(title={"text": f"layer ({name})"}, row=1, col=col)
        out.update_xaxes(zeroline=False)
        out.update_yaxes(title={"text": "signal over error, dB"}, row=1, col=1)
        below = {"orientation": "h", "y": -0.24, "yanchor": "top", "x": 0, "xanchor": "left"}
        out.update_layout(height=420, legend=below, margin={"b": 110})
        if left_out:
            figures.add_note(out, clean.note(left_out))
        return out

    def table(self) -> Table:
        """Bits per element, the ratio to 16 bits, and the worst and mean layer of keys and values."""
        rows = []
        for name, (k, v) in self.sqnr.items():
            bits = self.bits[name]
            rows.append((name, round(bits, 3), f"{16 / bits:.2f}×", *_told(k), *_told(v), "measured"))
        columns = ("format", "bits", "ratio", "keys dB", "worst layer", "values dB", "worst layer ", "tag")
        note = (
            f"{self.tokens} tokens of the evaluation text, without the first {SINKS}. Bits per element: all "
            "planes, scales and minima included, of coded tokens. dB: mean over layers; a bit is worth 6.02."
        )
        return Table.of(columns, rows, note=note)


def round_trips(session: Session, formats: Sequence[str], tokens: int) -> dict[str, RoundTrip]:
    """Coding and decoding of a cache of ``tokens`` in each format of the catalogue, e.g. ``"kivi:bits=2"``.

    A format is calibrated when it asks for it. Raises what its recipe or plan raises.
    """
    settings = QualitySettings(context=tokens, score=1, greedy=0)
    plans = {
        name: quality_plans(session.plan, Recipe.of(name), session.facts, settings)[0] for name in formats
    }

    def work(job: Job, _: Engine) -> Generator[None, None, dict[str, RoundTrip]]:
        def told(done: float, what: str) -> None:
            job.progress(done, 1.0, "", what)

        found = {}
        for name, plan in plans.items():
            decoder = session.decoder(plan, told, job.token)
            codec = kv_codec(plan, decoder, told, job.token)
            found[name] = page_format(codec, plan.page_size)
            yield
        return found

    made: dict[str, RoundTrip] = session.task("preparing KV formats", work).result()
    return made


def compare_formats(session: Session, formats: Sequence[str], rows: CachedRows) -> FormatErrors:
    """Code and decode ``rows`` of the session's model in each format.

    Raises what :func:`round_trips` raises, and :class:`OptionError` when no format is given or a format codes
    none of the tokens.
    """
    if not formats:
        raise OptionError("There is no format to compare.", hint='For example "kv_fp8".')
    sqnr, bits = {}, {}
    for name, trip in round_trips(session, formats, rows.tokens).items():
        with torch.inference_mode():
            back = trip(rows)
        coded = rows.tokens - back.exempt
        if coded <= SINKS:
            raise OptionError(f"{name} codes none of {rows.tokens} tokens.", hint="Give more tokens.")
        pair = ((rows.k, back.rows.k), (rows.v, back.rows.v))
        k, v = (tuple(map(sqnr_db, a, b, [coded] * len(a))) for a, b in pair)
        sqnr[name] = k, v
        elements = sum(x[0].numel() for x in (*rows.k, *rows.v))
        bits[name] = 8 * (back.payload - 2 * elements * back.exempt) / (elements * coded)
    return FormatErrors(sqnr, bits, rows.tokens)


def sqnr_db(x: Tensor, y: Tensor, coded: int) -> float:
    """Energy of ``x`` [T, H, D] over that of its error, in decibel: tokens 4 to ``coded``; inf if exact."""
    x, y = (t[SINKS:coded].double() for t in (x, y))
    error = float((x - y).square().sum())
    return 10 * float(torch.log10(x.square().sum() / error)) if error else float("inf")


def _lines(n: int) -> list[tuple[str, str]]:
    return [LINES[i % len(LINES)] for i in range(n)]


def _told(values: Sequence[float]) -> tuple[float, str]:
    worst = min(range(len(values)), key=lambda i: values[i])
    return round(sum(values) / len(values), 1), f"{worst}: {values[worst]:.1f}"
