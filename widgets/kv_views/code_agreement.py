"""Do neighbouring layers have the same codes? XQuant shares them; its premise beside two controls.

*Chance*: what the two layers' own distributions would give if they knew nothing of each other. *Shuffled*:
the same codes with the tokens of one layer in another order. Only what exceeds both is about tokens.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workbench.core.build import kv_codec
from workbench.core.quality import quality_plans
from workbench.core.quality_windows import QualitySettings
from workbench.kv.cached import CachedRows
from workbench.kv.xquant.agreement import Agreement, joint_counts, shuffled_tokens
from workbench.kv.xquant.schedule import pairs_of
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe
from workbench.widgets import figures
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine

LEVELS = 4
_SIDES = ("keys", "values")
_LAWS = (("observed", "#2f7fd1", ""), ("chance", "#d9822b", "/"), ("shuffled", "#7c8796", "x"))


@dataclass(frozen=True)
class CodeAgreement:
    """``found[side]``: agreement over all pairs of layers; ``pairs`` apart; ``tokens`` coded."""

    model: str
    found: tuple[Agreement, Agreement]
    pairs: dict[tuple[int, int], tuple[Agreement, Agreement]]
    tokens: int

    def figure(self, theme: Theme = "auto") -> Any:
        """How far apart the 2-bit codes of two neighbouring layers are, beside both controls."""
        out = figures.new(f"2-bit codes of neighbouring layers, {self.model} (measured)", theme=theme)
        out.set_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.05)
        for col, (side, name) in enumerate(zip(self.found, _SIDES, strict=True), 1):
            for law, colour, hatch in _LAWS:
                shares = getattr(side, law).tolist()
                out.add_bar(
                    x=[str(i) for i in range(len(shares))], y=shares, name=law, legendgroup=law,
                    showlegend=col == 1, row=1, col=col,
                    marker={"color": colour, "pattern": {"shape": hatch, "size": 6, "solidity": 0.3}},
                    hovertemplate=f"{name}, {law}: %{{y:.1%}} differ by %{{x}}<extra></extra>",
                )  # fmt: skip
            out.update_xaxes(title={"text": f"difference of {name}' codes"}, row=1, col=col)
        plain = figures.new("", theme=theme).layout.yaxis
        styled = {k: plain[k] for k in ("gridcolor", "linecolor", "zerolinecolor", "ticks", "tickcolor")}
        out.update_yaxes(**styled, tickformat=".0%")
        out.update_yaxes(title={"text": "share of elements"}, row=1, col=1)
        out.update_layout(barmode="group", height=340)
        return out

    def table(self) -> Table:
        """Share of codes within one of each other, and what is left of it beyond chance."""
        rows = []
        for side, name in enumerate(_SIDES):
            all_pairs = [p[side].kappa for p in self.pairs.values()]
            found = self.found[side]
            within = [f"{float(getattr(found, law)[:2].sum()):.1%}" for law, _, _ in _LAWS]
            spread = f"{min(all_pairs):.3f}–{max(all_pairs):.3f}"
            rows.append((name, *within, f"{found.kappa:.3f}", spread, "measured"))
        columns = (
            "", "within 1, observed", "by chance", "tokens shuffled", "beyond both (kappa)", "by pair", "tag",
        )  # fmt: skip
        note = f"{len(self.pairs)} pairs of layers, {self.tokens} tokens. Kappa: 0 is chance, 1 is always."
        return Table.of(columns, rows, note=note)


def compare_codes(session: Session, rows: CachedRows) -> CodeAgreement:
    """The 2-bit codes of ``rows`` of the session's model, pair by pair as XQuant would share them.

    Raises :class:`OptionError` for fewer rows than a page of it, or a model without pairs.
    """
    settings = QualitySettings(context=rows.tokens, score=1, greedy=0)
    recipe = Recipe.of("xquant:schedule=none")
    plan, _ = quality_plans(session.plan, recipe, session.facts, settings)
    pairs = pairs_of(g.layers for g in session.facts.config.kv_groups)
    size = plan.page_size
    pages = rows.tokens // size
    if not pages or not pairs:
        raise OptionError(
            f"{rows.tokens} tokens and {len(pairs)} pairs of layers leave nothing to compare.",
            hint=f"Give {size} tokens or more, of a model of two layers or more.",
        )

    def work(job: Job, _: Engine) -> Generator[None, None, list[tuple[torch.Tensor, torch.Tensor]]]:
        decoder = session.decoder(plan, lambda f, what: job.progress(f, 1.0, "", what), job.token)
        codec: Any = kv_codec(plan, decoder)
        found = []
        for layer, sides in enumerate(zip(rows.k, rows.v, strict=True)):
            k, v = (x[: pages * size].unflatten(0, (pages, size)).transpose(1, 2) for x in sides)
            with torch.inference_mode():
                found.append(codec.at(layer).codes(k, v))
            yield
        return found

    codes = session.task("coding layers", work).result()
    counts = torch.zeros(2, 2, len(pairs), LEVELS, LEVELS, dtype=torch.int64)  # side, shuffled, pair
    for i, (first, second) in enumerate(pairs):
        for side in (0, 1):
            a, b = codes[first][side], codes[second][side]
            counts[side, 0, i] = joint_counts(a, b, LEVELS)
            counts[side, 1, i] = joint_counts(a, shuffled_tokens(b, seed=second), LEVELS)
    whole = tuple(Agreement.of(*counts[side].sum(1)) for side in (0, 1))
    apart = {
        pair: (Agreement.of(*counts[0, :, i]), Agreement.of(*counts[1, :, i])) for i, pair in enumerate(pairs)
    }
    return CodeAgreement(str(session.plan.model), (whole[0], whole[1]), apart, pages * size)
