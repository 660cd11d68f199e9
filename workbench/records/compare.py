"""Two runs side by side: what changed in the recipe, in every number, in the text; and whether it is fair.

``compare(a, b).to_text()`` begins with one line in words ("2.1× faster, 31% less KV memory, KL 0.016 nats");
where the runs did different work, that line says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from workbench.records.conditions import Difference, apart, counted, differences
from workbench.records.deltas import Delta, deltas, numbers
from workbench.records.divergence import Divergence, divergences
from workbench.records.form import quantity, spread
from workbench.spec.recipe import Recipe, RecipeDiff
from workbench.spec.run import Metric, Run

_MARK = {"better": "▲ better", "worse": "▼ worse", "same": "= same", "changed": "changed"}
_HEADLINES = (
    (("decode_speed", "tpot"), ""),
    (("ttft",), "to the first token"),
    (("kv_bytes_per_token", "memory_kv"), "KV memory"),
    (("memory_weights",), "weight memory"),
)
_QUALITY = ("kl", "perplexity", "top1", "acceptance_tau")


@dataclass(frozen=True)
class Comparison:
    """What changes from run ``a`` to run ``b``; ``differences`` are those besides the recipe."""

    a: Run
    b: Run
    recipe: RecipeDiff
    deltas: tuple[Delta, ...]
    divergences: tuple[Divergence, ...]
    differences: tuple[Difference, ...]

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each difference, the most important first."""
        return tuple(d.sentence for d in self.differences)

    @property
    def apart(self) -> str:
        """In a few words, why speeds are not compared; empty when they are."""
        return apart(self.differences)

    @property
    def fair(self) -> bool:
        """True when nothing but the recipe differs."""
        return not self.differences

    @property
    def numerics(self) -> tuple[str, str]:
        """Declared numerics class of each run."""
        return self.a.numerics, self.b.numerics

    def delta(self, name: str) -> Delta | None:
        """The comparison of one number."""
        return next((d for d in self.deltas if d.name == name), None)

    @property
    def headline(self) -> str:
        """The few differences people ask for first, in words."""
        parts = [f"not comparable: {self.apart}"] if self.apart else []
        for names, what in _HEADLINES if not self.apart else ():
            found = next((d for n in names if (d := self.delta(n)) is not None), None)
            if found is not None and found.direction != "same":
                parts.append(f"{found.words} {what}".strip())
        new = {m.name: m for m in numbers(self.b)}
        for name in _QUALITY:
            if name in new:
                parts.append(f"{_label(name)} {quantity(new[name])}")
        return ", ".join(parts) or "no difference in the numbers both runs have"

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain row per shared number."""
        return [
            {
                "name": d.name,
                "unit": d.unit,
                "tag": d.a.tag if d.a.tag == d.b.tag else f"{d.a.tag}/{d.b.tag}",
                "a": d.a.value,
                "b": d.b.value,
                "spread_a": list(d.a.spread) if d.a.spread else None,
                "spread_b": list(d.b.spread) if d.b.spread else None,
                "n_a": d.a.n,
                "n_b": d.b.n,
                "ratio": d.ratio,
                "direction": d.direction,
                "overlap": d.overlap,
                "words": d.words,
            }
            for d in self.deltas
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON form: ids, headline, recipe difference, rows, divergences, warnings, why speeds are apart."""
        return {
            "a": self.a.id,
            "b": self.b.id,
            "headline": self.headline,
            "fair": self.fair,
            "apart": self.apart,
            "warnings": list(self.warnings),
            "numerics": list(self.numerics),
            "recipe": {name: list(getattr(self.recipe, name)) for name in ("added", "removed", "changed")},
            "rows": self.to_rows(),
            "divergences": [{**vars(d)} for d in self.divergences],
        }

    def to_text(self, warn: bool = True) -> str:
        """A page of text for a terminal; without the warnings where they are said elsewhere."""
        lines = [self.headline, *_heads(self), *(map(_unfair, self.warnings) if warn else ()), ""]
        table = [(d.name, _cell(d.a), _cell(d.b), _MARK[d.direction], d.words) for d in self.deltas]
        table.insert(0, ("", "A", "B", "", ""))
        widths = [max(len(row[i]) for row in table) for i in range(4)]
        for row in table:
            name, first, second, mark = (c.ljust(w) for c, w in zip(row, widths, strict=False))
            lines.append(f"{name}  {first}  {second}  {mark}  {row[4]}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same as a table; every text is escaped."""
        rows = "".join(
            f"<tr><th scope='row'>{escape(d.name)}</th><td>{escape(_cell(d.a))}</td>"
            f"<td>{escape(_cell(d.b))}</td><td>{_MARK[d.direction]}</td><td>{escape(d.words)}</td>"
            f"<td>{escape(d.a.tag)}</td></tr>"
            for d in self.deltas
        )
        lines = [*_heads(self), *map(_unfair, self.warnings)]
        heads = "".join(f"<p>{escape(line)}</p>" for line in lines)
        return (
            f"<div><p><strong>{escape(self.headline)}</strong></p>{heads}"
            "<table><thead><tr><th>number</th><th>A</th><th>B</th><th>direction</th><th>in words</th>"
            f"<th>tag</th></tr></thead><tbody>{rows}</tbody></table></div>"
        )


def compare(a: Run, b: Run) -> Comparison:
    """What changes from ``a`` to ``b``."""
    recipe = Recipe.from_json(a.recipe).diff(Recipe.from_json(b.recipe))
    apart_by = differences(a, b)
    found = deltas(a, b, comparable=not apart(apart_by))
    return Comparison(a, b, recipe, found, divergences(a, b), apart_by)


def to_text(comparisons: Sequence[Comparison]) -> str:
    """Several comparisons with one base; what makes them unfair is said once, with how many it concerns."""
    if len(comparisons) == 1:
        return comparisons[0].to_text()
    warnings = [_unfair(w) for w in counted([c.differences for c in comparisons])]
    return "\n\n".join(
        [*(c.to_text(warn=False) for c in comparisons), *(["\n".join(warnings)] * bool(warnings))]
    )


def _heads(c: Comparison) -> list[str]:
    lines = [f"A {_run(c.a)}", f"B {_run(c.b)}"]
    changes = [f"{sign}{i}" for sign, ids in _changes(c.recipe).items() for i in ids]
    lines.append(f"recipe: {' '.join(changes) if changes else 'the same'}")
    lines.append(f"numerics: {c.a.numerics} / {c.b.numerics}")
    lines += [f"output {d.index}: {d.words}" for d in c.divergences]
    return lines


def _unfair(warning: str) -> str:
    return f"not a fair comparison: {warning}"


def _changes(diff: RecipeDiff) -> Mapping[str, tuple[str, ...]]:
    return {"+": diff.added, "−": diff.removed, "~": diff.changed}


def _run(run: Run) -> str:
    return f"{run.id[:8]} {run.model}: {run.subject}"


def _label(name: str) -> str:
    return {"kl": "KL", "acceptance_tau": "τ", "top1": "top-1 agreement"}.get(name, name)


def _cell(metric: Metric) -> str:
    return quantity(metric) + spread(metric)
