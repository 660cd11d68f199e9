"""Which rules keep the target's law, to the last digit? Every rule of the catalogue on a toy vocabulary.

The joint law of γ + 1 tokens is enumerated, not sampled (``workbench.speculative.exact_law``), for every kind
of draft a rule can judge, and compared with the target's own. Imitations that are wrong in one way each stand
below: whatever cannot tell them from the real ones is no test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workbench.core import catalog
from workbench.engine.draft_seams import DraftTree, Verdict, Verify
from workbench.spec.errors import InvariantError, OptionError
from workbench.spec.technique import Kind
from workbench.speculative import exact_law, imitations, predict
from workbench.speculative.exact_law import Drafts, Rule
from workbench.widgets import figures
from workbench.widgets.palette import INKS, SOURCES, Theme
from workbench.widgets.spec_views.badge import badge
from workbench.widgets.table import Table

MOST = 6000  # drafts that are enumerated at most
FLOOR = 1e-17  # a distance of exactly 0 has no place on a log axis
_WRONG = "#c0392b"
_SHAPES: dict[str, str] = {"exact": "circle-open", "lossy": "diamond", "wrong": "x"}
_COLOURS: dict[str, str] = {"exact": SOURCES["accepted"], "lossy": SOURCES["corrected"], "wrong": _WRONG}

# how drafts are made: (drafter's law, γ) -> every draft with its probability
KINDS: dict[str, Callable[[Tensor, int], Drafts]] = {
    "sampled chain": exact_law.sampled_chains,
    "likeliest chain": exact_law.likeliest_chain,
    "siblings, none twice": exact_law.sampled_siblings,
}


@dataclass(frozen=True)
class LawRow:
    """One rule on one kind of draft.

    ``kind`` is what its technique claims, None for an imitation. ``distance``: total variation between its
    joint law and the target's. ``accepted``: drafted tokens kept a round. ``first``: the first token's law.
    ``zero``: at temperature 0, where the target's law is its likeliest token.
    """

    rule: str
    drafts: str
    kind: Kind | None
    distance: float
    accepted: float
    first: tuple[float, ...]
    zero: bool = False

    @property
    def claim(self) -> str:
        """What it says of itself: exact, lossy, or wrong."""
        return self.kind or "wrong"

    @property
    def name(self) -> str:
        """Rule and drafts in words."""
        return f"{self.rule}, {self.drafts}"


@dataclass(frozen=True)
class RuleLaws:
    """Rules side by side for one target law p, one drafter's law q and one γ."""

    p: tuple[float, ...]
    q: tuple[float, ...]
    gamma: int
    rows: tuple[LawRow, ...]

    @property
    def alpha(self) -> float:
        """1 - TV(p, q) = Σ min(p, q)."""
        return sum(map(min, self.p, self.q))

    def row(self, rule: str, drafts: str = "sampled chain") -> LawRow:
        """The row of a rule; raises :class:`OptionError` for one that is not there."""
        for row in self.rows:
            if (row.rule, row.drafts) == (rule, drafts):
                return row
        known = ", ".join(dict.fromkeys(r.rule for r in self.rows))
        raise OptionError(f"There is no row of {rule} on a {drafts}.", hint=f"Rules: {known}.")

    def figure(self, theme: Theme = "auto") -> Any:
        """Distance from the target's law on a log axis: rounding to the left, wrong to the right."""
        title = f"Distance of {self.gamma + 1} tokens from the target's law (enumerated)"
        out = figures.new(title, theme=theme, x="total variation (log)")
        for claim in _SHAPES:
            mine = [r for r in self.rows if r.claim == claim]
            out.add_scatter(
                x=[max(r.distance, FLOOR) for r in mine], y=[r.name for r in mine], mode="markers",
                name={"wrong": "imitation"}.get(claim, claim),
                marker={"color": _COLOURS[claim], "symbol": _SHAPES[claim], "size": 11, "line": {"width": 2}},
                hovertemplate="%{y}: %{x:.3g}<extra></extra>",
            )  # fmt: skip
        out.add_vline(x=1e-12, line={"color": INKS[theme]["axis"], "width": 1, "dash": "dash"})
        out.add_annotation(  # on a log axis a line is placed by its value, words by its logarithm
            x=-12, xanchor="left", xshift=4, y=1, yref="paper", yanchor="top", showarrow=False,
            text="rounding ends here", font={"size": 11},
        )  # fmt: skip
        out.update_xaxes(type="log", range=[-17.4, 0.2], dtick=3, exponentformat="power")
        names = [r.name for r in self.rows]
        out.update_yaxes(categoryorder="array", categoryarray=names, autorange="reversed")
        out.update_layout(height=130 + 26 * len(names), margin={"l": 240, "t": 72})
        return out

    def figure_first(self, theme: Theme = "auto") -> Any:
        """The first token's law: of the target, the drafter, an exact rule, and of imitations."""
        out = figures.new("The first token's law (enumerated)", theme=theme, x="token", y="probability")
        tokens = [str(i) for i in range(len(self.p))]
        drawn = [("target p", self.p, "#7c8796", ""), ("drafter q", self.q, "#b9a7dd", ".")]
        sampled = (r for r in self.rows if r.drafts == "sampled chain" and not r.zero)
        exact = next((r for r in sampled if r.kind == "exact"), None)
        drawn += [(f"{exact.rule}: exact", exact.first, SOURCES["accepted"], "/")] if exact else []
        wrong = [r for r in self.rows if r.kind is None and _far(r.first, self.p)]
        for r, hatch in zip(wrong, ("x", "\\", "+", "-", "|"), strict=False):
            drawn.append((r.rule, r.first, _WRONG, hatch))
        for name, law, colour, hatch in drawn:
            out.add_bar(
                x=tokens, y=law, name=name,
                marker={"color": colour, "pattern": {"shape": hatch, "size": 5, "solidity": 0.35}},
                hovertemplate=f"{name}, token %{{x}}: %{{y:.4f}}<extra></extra>",
            )  # fmt: skip
        out.update_layout(barmode="group", bargap=0.2, margin={"t": 84})
        return out

    def table(self) -> Table:
        """A row per rule and kind of draft: what it claims, how far off it is, how much it keeps."""
        rows = [
            (
                r.rule, r.drafts, badge(r.kind) if r.kind else "imitation", f"{r.distance:.1e}",
                "kept" if r.distance < 1e-12 else "changed", r.accepted, 1 + r.accepted,
            )
            for r in self.rows
        ]  # fmt: skip
        columns = ("rule", "drafts", "claims", "TV from target", "law", "accepted a round", "tokens a round")
        note = f"Joint law of {self.gamma + 1} tokens, all drafts, draws and coins enumerated in float64."
        return Table.of(columns, rows, note=note)

    def acceptance(self) -> Table:
        """α three ways, and tokens a round of a chain and of a tree enumerated beside the closed forms."""
        one = exact_law.mean_accepted(_verify("verify").sampled, _matrix(self.p), _chains(self.q, 1))
        many = exact_law.mean_accepted(
            _verify("verify").sampled, _matrix(self.p), _chains(self.q, self.gamma)
        )
        tv = sum(abs(a - b) for a, b in zip(self.p, self.q, strict=True)) / 2
        closed = predict.expected_tokens(self.alpha, self.gamma)
        tree = self._tree()
        grown = exact_law.mean_accepted(_verify("verify", rule="r3").sampled, _matrix(self.p), [(1.0, tree)])
        nodes = predict.expected_tokens_of_tree(tree.parents, [self.p[t] for t in tree.tokens])
        rows = [
            ("α: first draft kept, enumerated", one, "enumerated"),
            ("1 - TV(p, q)", 1 - tv, "closed form"),
            ("Σ min(p, q)", self.alpha, "closed form"),
            (f"tokens a round, γ = {self.gamma}, enumerated", 1 + many, "enumerated"),
            ("(1 - α^(γ+1)) / (1 - α)", closed, "closed form"),
            ("tokens a round, tree of q's likeliest two and one, r3, enumerated", 1 + grown, "enumerated"),
            ("1 + Σ over nodes of p multiplied along the path", nodes, "closed form"),
        ]
        return Table.of(("", "value", "how"), rows)

    def _tree(self) -> DraftTree:
        """The drafter's two likeliest tokens, and its likeliest below each of them."""
        a, b = sorted(range(len(self.q)), key=self.q.__getitem__)[:-3:-1]
        return DraftTree((a, b, a, a), (-1, -1, 0, 1), "likeliest")

    def live(self) -> Any:
        """Fields for p, q and γ; every change enumerates again."""
        from workbench.widgets.spec_views.law_live import explorer

        return explorer(self)


def law_of_rules(p: Sequence[float], q: Sequence[float], gamma: int = 2) -> RuleLaws:
    """All rules for a target that draws every token from ``p`` and a drafter that draws from ``q``.

    Raises :class:`OptionError` for what is no law, and for more drafts than can be enumerated.
    """
    _check(p, q, gamma)
    target, draft = _matrix(p), _matrix(q)
    rows = [_row(*found, target, draft, gamma) for found in _rules()]
    rows.sort(key=lambda r: (not r.zero, r.kind != "exact"))  # equals stay in the catalogue's order
    rows += [
        _wrong(name, "sampled chain", rule, target, list(exact_law.sampled_chains(draft, gamma)), gamma)
        for name, rule in imitations.SAMPLED_CHAINS.items()
    ]
    exact = _verify("verify", rule="r2").sampled
    rows += [
        _wrong(name, "sampled chain", exact, target, list(make(draft, gamma)), gamma)
        for name, make in imitations.DRAFTS.items()
    ]
    return RuleLaws(tuple(p), tuple(q), gamma, tuple(rows))


# -- inside -------------------------------------------------------------------------------------------


def _rules() -> Iterator[tuple[str, str, Kind, Rule, bool]]:
    """(rule, drafts, kind, function, at temperature 0) of every verifying technique and every rule it has."""
    greedy = set[tuple[str, str]]()
    for technique in catalog.all_techniques():
        if technique.spec.seam != "verify":
            continue
        option = next((o for o in technique.options if o.name == "rule"), None)
        for choice in [c for c in option.choices if c != "auto"] if option is not None else [None]:
            verify = _verify(technique.id, **({"rule": choice} if choice is not None else {}))
            for drafts, make in KINDS.items():
                _, probe = next(iter(make(torch.full((3, 3), 1 / 3, dtype=torch.float64), 2)))
                zero = verify.rule_for(probe, greedy=True)
                if (zero, drafts) not in greedy and technique.spec.kind == "exact":
                    greedy.add((zero, drafts))
                    yield f"{zero}, temperature 0", drafts, "exact", _at_zero(verify), True
                try:
                    name = verify.rule_for(probe, greedy=False)
                    verify.sampled(probe, torch.full((len(probe.tokens) + 1, 3), 1 / 3, dtype=torch.float64),
                                   lambda law, depth: int(law.argmax()), lambda depth, i: 0.5)  # fmt: skip
                except (OptionError, InvariantError):
                    continue  # it cannot judge such drafts, and says so
                yield name, drafts, technique.spec.kind, verify.sampled, False


def _verify(technique: str, **options: Any) -> Verify:
    found = catalog.get(technique)
    made: Verify = found.bind(found.configure(options), None)
    return made


def _at_zero(verify: Verify) -> Rule:
    def judge(tree: DraftTree, p: Tensor, sample: Any, coin: Any) -> Verdict:
        return verify.greedy(tree, p.argmax(-1).tolist())

    return judge


def _row(
    rule: str, drafts: str, kind: Kind, judge: Rule, zero: bool, target: Tensor, draft: Tensor, gamma: int
) -> LawRow:
    if zero:
        target = torch.nn.functional.one_hot(target.argmax(-1), target.shape[1]).double()
    wide = min(gamma, int((draft[0] > 0).sum()))
    made = list(KINDS[drafts](draft, wide if "siblings" in drafts else gamma))
    return replace(_measured(rule, drafts, kind, judge, target, made, gamma), zero=zero)


def _wrong(name: str, drafts: str, judge: Rule, target: Tensor, made: list[Any], gamma: int) -> LawRow:
    return _measured(name, drafts, None, judge, target, made, gamma)


def _measured(
    rule: str, drafts: str, kind: Kind | None, judge: Rule, target: Tensor, made: list[Any], gamma: int
) -> LawRow:
    law = exact_law.output_law(judge, target, made, gamma + 1)
    want = exact_law.future(target, 0, gamma + 1)
    first = law.flatten(1).sum(-1) if law.ndim > 1 else law
    accepted = exact_law.mean_accepted(judge, target, made)
    return LawRow(rule, drafts, kind, exact_law.distance(law, want), accepted, tuple(first.tolist()))


def _matrix(law: Sequence[float]) -> Tensor:
    return torch.tensor(list(law), dtype=torch.float64).expand(len(law), -1).contiguous()


def _chains(q: Sequence[float], gamma: int) -> Drafts:
    return exact_law.sampled_chains(_matrix(q), gamma)


def _far(a: Sequence[float], b: Sequence[float]) -> bool:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) > 1e-9


def _check(p: Sequence[float], q: Sequence[float], gamma: int) -> None:
    for name, law in (("p", p), ("q", q)):
        if len(law) < 2 or min(law) < 0 or abs(sum(law) - 1) > 1e-6:
            raise OptionError(
                f"{name} = {list(law)} is no law: {len(law)} numbers that add up to {sum(law):.4g}.",
                hint="Give two probabilities or more that add up to 1.",
            )
    if len(p) != len(q):
        raise OptionError(f"p has {len(p)} tokens and q {len(q)}.", hint="Give both the same vocabulary.")
    if gamma < 1 or len(p) ** gamma > MOST:
        raise OptionError(
            f"γ = {gamma} on {len(p)} tokens makes {len(p)}^{gamma} drafts.",
            hint=f"Choose γ from 1 so that there are at most {MOST:,}.",
        )
