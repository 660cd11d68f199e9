"""Do neighbouring layers have the same codes? XQuant shares them; its premise beside two controls.

*Chance*: what the two layers' own distributions would give if they knew nothing of each other. *Shuffled*:
the same codes with the tokens of one layer in another order. Only what exceeds both is about tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.core.code_agreement import CodeAgreement, code_agreement
from workbench.kv.cached import CachedRows
from workbench.widgets import figures
from workbench.widgets.palette import Theme
from workbench.widgets.table import Table

if TYPE_CHECKING:
    from workbench.core.session import Session

_SIDES = ("keys", "values")
_LAWS = (("observed", "#2f7fd1", ""), ("chance", "#d9822b", "/"), ("shuffled", "#7c8796", "x"))


@dataclass(frozen=True)
class CodesBesideChance:
    """Agreement as it was found, with its picture and table."""

    codes: CodeAgreement

    def figure(self, theme: Theme = "auto") -> Any:
        """How far apart the 2-bit codes of two neighbouring layers are, beside both controls."""
        out = figures.new(f"2-bit codes of neighbouring layers, {self.codes.model} (measured)", theme=theme)
        out.set_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.05)
        for col, (side, name) in enumerate(zip(self.codes.whole, _SIDES, strict=True), 1):
            for law, colour, hatch in _LAWS:
                shares = getattr(side, law).tolist()
                out.add_bar(
                    x=[str(i) for i in range(len(shares))], y=shares, name=law, legendgroup=law,
                    showlegend=col == 1, row=1, col=col,
                    marker={"color": colour, "pattern": {"shape": hatch, "size": 6, "solidity": 0.3}},
                    hovertemplate=f"{name}, {law}: %{{y:.1%}} differ by %{{x}}<extra></extra>",
                )  # fmt: skip
            out.update_xaxes(title={"text": f"difference of {name}' codes"}, row=1, col=col)
        out.update_yaxes(tickformat=".0%")
        out.update_yaxes(title={"text": "share of elements"}, row=1, col=1)
        out.update_layout(barmode="group", height=340)
        return out

    def table(self) -> Table:
        """Share of codes within one of each other, and what is left of it beyond chance."""
        rows = []
        for side, name in enumerate(_SIDES):
            all_pairs = [p[side].kappa for p in self.codes.pairs.values()]
            found = self.codes.whole[side]
            within = [f"{float(getattr(found, law)[:2].sum()):.1%}" for law, _, _ in _LAWS]
            spread = f"{min(all_pairs):.3f} to {max(all_pairs):.3f}"
            rows.append((name, *within, f"{found.kappa:.3f}", spread, "measured"))
        columns = (
            "", "within 1, observed", "by chance", "tokens shuffled", "beyond both (kappa)", "by pair", "tag",
        )  # fmt: skip
        pairs, tokens = len(self.codes.pairs), self.codes.tokens
        note = f"{pairs} pairs of layers, {tokens} tokens. Kappa: 0 is chance, 1 is always."
        return Table.of(columns, rows, note=note)


def compare_codes(session: Session, rows: CachedRows) -> CodesBesideChance:
    """The codes of ``rows`` of the session's model; raises what :func:`code_agreement` raises."""
    return CodesBesideChance(code_agreement(session, rows))
