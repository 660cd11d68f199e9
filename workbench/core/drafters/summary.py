"""All cells as one :class:`Run`: rows, crossovers, coverage of vocabularies; every number as a metric too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from workbench.core.drafters.contestants import Traits, heads_of, traits_of
from workbench.core.drafters.costs import Costs
from workbench.core.drafters.crossing import Crossing, crossing
from workbench.core.drafters.known import Group
from workbench.core.drafters.prompt_sets import set_name
from workbench.core.drafters.results import BAR, Row, rows_of
from workbench.core.drafters.settings import NAME, PLAIN, SIZES, Cell, DrafterSettings
from workbench.core.drafters.turns import Turn
from workbench.core.drafters.vocabulary import LISTS, WANTED, Covered, coverage, drafted_size, list_of
from workbench.core.plan import ModelFacts
from workbench.core.provenance import process_memory
from workbench.core.run_of import run_of
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run


@dataclass
class Measured:
    """A cell and what is known of it: a group per turn, None where it is not measured yet."""

    cell: Cell
    plans: Mapping[str, Plan]
    prompts: Sequence[tuple[tuple[int, ...], ...]]
    groups: list[Group | None]
    costs: Costs | None = None
    traits: Mapping[str, Traits] = field(default_factory=dict)

    @property
    def missing(self) -> int:
        """Turns not measured yet."""
        return sum(g is None for g in self.groups)

    @property
    def turns(self) -> dict[str, list[Turn]]:
        """Turns that are known, by contestant."""
        return {n: [g.turns[n] for g in self.groups if g is not None] for n in self.plans}

    @property
    def halves(self) -> list[int]:
        """Of which half each of them is."""
        return [i % 2 for i, g in enumerate(self.groups) if g is not None]


def summary(
    settings: DrafterSettings, facts: ModelFacts, measured: Sequence[Measured], notes: Sequence[str]
) -> Run:
    """The run, with all that is known; its plan holds the rows of every table."""
    for m in measured:
        m.traits = {n: traits_of(p, facts.config) for n, p in m.plans.items()}
    rows = [row for m in measured for row in _rows(m)]
    crossings = _crossings(settings, measured)
    covered = _covered(facts, measured, rows)
    plain = measured[0].plans[PLAIN]
    names = list(dict.fromkeys(n for m in measured for n in m.plans))
    told = {
        "name": NAME,
        "contestants": names,
        "cells": {m.cell.label: _about(m) for m in measured},
        "sizes": {**SIZES, **settings.sizes},
        "temperature": settings.temperature,
        "rows": [r.to_dict() for r in rows],
        "crossings": [c.to_dict() for c in crossings],
        "vocabulary": [c.to_dict() for c in covered],
    }
    metrics = [_plain(m) for m in measured if _known(m)]
    metrics += [metric for row in rows for metric in row.metrics()]
    metrics += [metric for one in crossings for metric in one.metrics()]
    metrics += [c.metric() for c in covered if not c.drafter]
    within = [r.error <= BAR for r in rows if r.error is not None]
    if within:
        metrics.append(
            Metric("predicted_within_15_percent", sum(within) / len(within), "", n=len(within),
                   note="share of drafters and cells", better="higher")
        )  # fmt: skip
    return run_of(
        plain,
        "bench",
        (*metrics, *process_memory(settings.device)),
        {"bench": told},
        recipe=Recipe(),
        profile=settings.profile,
        notes=(*notes, *_too_short(covered)),
    )


def _rows(m: Measured) -> list[Row]:
    if m.costs is None or not _known(m):
        return []
    return rows_of(m.cell, m.turns, m.halves, m.costs, {n: t.own_forward for n, t in m.traits.items()})


def _crossings(settings: DrafterSettings, measured: Sequence[Measured]) -> list[Crossing]:
    out = []
    for prompts in settings.prompts:
        by: dict[int, Measured] = {}
        for m in measured:
            c = m.cell
            first = (c.weights, c.numerics) == (settings.weights[0], settings.numerics[0])
            if c.prompts == prompts and first and m.costs is not None and _known(m):
                by[c.batch] = m
        costs = {b: m.costs for b, m in by.items() if m.costs is not None}
        names = dict.fromkeys(n for m in by.values() for n in m.plans if n != PLAIN)
        for name in names:
            sides = {b: (m.turns[name], m.turns[PLAIN]) for b, m in by.items() if name in m.plans}
            traits = next(m.traits[name] for m in by.values() if name in m.plans)
            found = crossing(set_name(prompts), name, sides, costs, traits)
            out += [found] if found is not None else []
    return out


def _covered(facts: ModelFacts, measured: Sequence[Measured], rows: Sequence[Row]) -> list[Covered]:
    """Of every head's list, on what plain decoding said in each cell of the first weights and numerics."""
    out: list[Covered] = []
    seen: set[str] = set()
    by = {(r.cell, r.drafter): r for r in rows}
    for m in measured:
        if m.cell.prompts in seen or not _known(m):
            continue
        seen.add(m.cell.prompts)  # the answers of other cells are the same
        answers = [ids for turn in m.turns[PLAIN] for ids in turn.outputs]
        lists: dict[str, list[int]] = {}
        for name, plan in m.plans.items():
            for head in heads_of(plan.recipe, facts):
                listed = lists.setdefault(head.kind, list_of(head))
                size = drafted_size(plan.recipe, len(listed))
                row = by.get((m.cell.label, name))
                if size is not None and listed and row is not None:
                    share = coverage(listed, answers, [size])[0]
                    out.append(Covered(m.cell.label, head.kind, size, share, name, row.tau, row.draft_ms))
        for kind, listed in lists.items():
            sizes = [n for n in LISTS if n <= len(listed)]
            sizes += [len(listed)] if listed and len(listed) not in sizes else []
            shares = coverage(listed, answers, sizes)
            out += [Covered(m.cell.label, kind, n, s) for n, s in zip(sizes, shares, strict=True)]
    return out


def _too_short(covered: Sequence[Covered]) -> list[str]:
    """Lists that should be longer, by the worst prompts."""
    worst: dict[str, Covered] = {}
    for c in covered:
        if c.enough is False and not c.drafter and c.coverage < worst.get(c.head, c).coverage + 1e-12:
            worst[c.head] = c
    return [
        f"{c.head}: {c.size:,} tokens cover {c.coverage:.3f} of the answers of {c.cell}, less than {WANTED}: "
        f"compare longer lists with --vocab"
        for c in worst.values()
    ]


def _plain(m: Measured) -> Metric:
    turns = [t for t in m.turns[PLAIN] if t.steps]
    rates = [1e3 * t.tokens / t.ms for t in turns]
    whole = 1e3 * sum(t.tokens for t in turns) / sum(t.ms for t in turns)
    note = f"all prompts together; median of turns {median(rates):.4g}"
    spread = (min(rates), max(rates))
    return Metric(
        f"{m.cell.label}:{PLAIN}", whole, "tok/s", n=len(rates), spread=spread, better="higher", note=note
    )


def _known(m: Measured) -> bool:
    return any(t.steps for t in m.turns.get(PLAIN, ()))


def _about(m: Measured) -> dict[str, object]:
    """A cell's part of the record."""
    lengths = [len(ids) for group in m.prompts for ids in group]
    return {
        "prompts": set_name(m.cell.prompts),
        "batch": m.cell.batch,
        "weights": m.cell.weights,
        "numerics": m.cell.numerics,
        "turns": len(m.groups),
        "measured": len(m.groups) - m.missing,
        "prompt_tokens": round(fmean(lengths), 1),
        "recipe": m.plans[PLAIN].recipe.to_json(),
    }
