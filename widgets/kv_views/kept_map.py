"""Which tokens did a selector keep, head by head? One row per layer and KV head, one column per few tokens.

Bright is kept, dark is gone. What every selector keeps shows as columns (sinks, the last tokens), what a
method believes in as the pattern between; the slider changes the method. Every token after the selection is
seen by all heads and is not drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean
from typing import TYPE_CHECKING, Any

from workbench.core import catalog
from workbench.engine.params import SamplingParams
from workbench.engine.snapshot import SequenceKept
from workbench.spec.errors import OptionError, RecordError
from workbench.spec.events import Event
from workbench.spec.recipe import Recipe
from workbench.widgets import figures
from workbench.widgets.palette import INKS, B, Theme
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.session import Session

Heads = dict[int, tuple[tuple[int, ...], ...]]
BINS = 192  # columns at most
FIRST, LAST = 4, 64  # what a table calls first and last tokens
_ROWS = 48  # labels on the axis at most


@dataclass(frozen=True)
class KeptTokens:
    """``kept[method][layer][head]`` are token numbers of a context of ``tokens``, ascending."""

    model: str
    tokens: int
    kept: dict[str, Heads]

    def __post_init__(self) -> None:
        if not self.kept or self.tokens < 1 or not all(self.kept.values()):
            raise RecordError("No selector kept anything.", hint="Give a context longer than what is kept.")

    def rows(self, method: str) -> list[tuple[str, tuple[int, ...]]]:
        """Every layer and head with its tokens, in order."""
        return [
            (f"layer {layer}, head {head}", tokens)
            for layer, heads in sorted(self.kept[method].items())
            for head, tokens in enumerate(heads)
        ]

    def binned(self, method: str) -> list[list[float]]:
        """Share of each bin of tokens that a head kept; a bin is ``ceil(tokens / BINS)`` tokens."""
        width = -(-self.tokens // BINS)
        bins = -(-self.tokens // width)
        out = []
        for _, tokens in self.rows(method):
            counts = [0] * bins
            for token in tokens:
                counts[token // width] += 1
            sizes = [min(width, self.tokens - i * width) for i in range(bins)]
            out.append([round(c / n, 3) for c, n in zip(counts, sizes, strict=True)])
        return out

    def figure(self, theme: Theme = "auto") -> Any:
        """The heat map, with a slider over methods when there are several."""
        out = figures.new(f"Tokens kept of {self.tokens:,} by {self.model} (measured)", theme=theme)
        width = -(-self.tokens // BINS)
        for number, method in enumerate(self.kept):
            names, z = [name for name, _ in self.rows(method)], self.binned(method)
            out.add_heatmap(
                z=z, x=[i * width for i in range(len(z[0]))], y=names, zmin=0, zmax=1, colorscale="Cividis",
                visible=number == 0, xgap=0, ygap=1,
                hovertemplate="%{y}, tokens from %{x}: %{z:.0%} kept<extra></extra>",
                colorbar={"title": {"text": "kept"}, "tickformat": ".0%", "len": 0.9},
            )  # fmt: skip
        rows = len(self.rows(next(iter(self.kept))))
        out.update_xaxes(title={"text": "token of the context"}, showgrid=False, zeroline=False)
        out.update_yaxes(autorange="reversed", showgrid=False, nticks=min(rows, _ROWS))
        out.update_layout(height=190 + min(max(14 * rows, 140), 560), margin={"t": 48, "l": 110, "b": 56})
        if len(self.kept) > 1:
            self._add_slider(out, INKS[theme])
        return out

    def table(self) -> Table:
        """Per method: share kept, and how far heads agree with each other."""
        rows = []
        for method in self.kept:
            sets = [set(tokens) for _, tokens in self.rows(method)]
            sizes = [len(s) / self.tokens for s in sets]
            last = set(range(self.tokens - LAST, self.tokens))
            heads = [a & b for a, b in combinations(sets, 2)]
            union = [a | b for a, b in combinations(sets, 2)]
            same = mean(len(i) / len(u) for i, u in zip(heads, union, strict=True)) if heads else 1.0
            spread = f" ({min(sizes):.0%}–{max(sizes):.0%})" if max(sizes) - min(sizes) > 0.005 else ""
            rows.append(
                (
                    method, f"{mean(sizes):.1%}{spread}",
                    f"{mean(len(s & set(range(FIRST))) / FIRST for s in sets):.0%}",
                    f"{mean(len(s & last) / LAST for s in sets):.0%}",
                    f"{same:.2f}", "measured",
                )
            )  # fmt: skip
        columns = ("method", "kept", f"of the first {FIRST}", f"of the last {LAST}", "heads agree", "tag")
        note = (
            f"Mean over {len(self.rows(next(iter(self.kept))))} layers and heads (lowest–highest where they "
            "differ). Heads agree: tokens two heads share over those either keeps, mean over pairs; 1 is all."
        )
        return Table.of(columns, rows, note=note)

    def _add_slider(self, out: Any, ink: dict[str, str]) -> None:
        count = len(self.kept)
        steps = [
            {"method": "restyle", "args": [{"visible": [i == n for i in range(count)]}], "label": method}
            for n, method in enumerate(self.kept)
        ]
        out.update_layout(
            height=out.layout.height + 96,
            margin={"b": 152},
            sliders=[
                {
                    "active": 0, "steps": steps, "pad": {"t": 60}, "ticklen": 3, "tickcolor": ink["axis"],
                    "currentvalue": {
                        "prefix": "method: ", "xanchor": "left", "font": {"size": 12, "color": ink["text"]}
                    },
                    "font": {"size": 1, "color": "rgba(0,0,0,0)"}, "bgcolor": ink["grid"],
                    "bordercolor": ink["axis"], "activebgcolor": B,
                }
            ],
        )  # fmt: skip


def kept_tokens(
    session: Session, methods: Sequence[str] | Mapping[str, str], ids: Sequence[int]
) -> KeptTokens:
    """What each selector keeps of the prompt ``ids`` at its end; the session's recipe is put back.

    ``methods`` are texts such as ``"snapkv:keep=0.5"``. Raises :class:`OptionError` for what is no selector,
    :class:`RecordError` when nothing was dropped, and what recipes and requests raise.
    """
    named = dict(methods) if isinstance(methods, Mapping) else {m: m for m in methods}
    recipes = {name: Recipe.of("paged", text) for name, text in named.items()}
    for name, recipe in recipes.items():
        if not any(catalog.get(use.id).spec.seam == "kv_selector" for use in recipe):
            raise OptionError(f"{name} keeps everything.", hint='Give a KV selector, for example "snapkv".')
    before, kept = session.recipe, {}
    try:
        for name, recipe in recipes.items():
            session.apply(recipe).result()
            found = _first_kept(session, ids)
            kept[name] = found.layers if found is not None else {}
    finally:
        session.apply(before).result()
    return KeptTokens(str(session.plan.model), len(ids), kept)


def _first_kept(session: Session, ids: Sequence[int]) -> SequenceKept | None:
    """What the first selection of a request kept."""
    seen: list[SequenceKept] = []

    def look(_: Event) -> None:
        if not seen:
            seen.extend(session.kept())

    stop = session.listen(look)
    try:
        session.submit(list(ids), SamplingParams(max_tokens=3, ignore_eos=True)).result()
    finally:
        stop()
    return seen[0] if seen else None
