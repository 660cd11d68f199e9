"""``workbench bench drafters``: drafters and plain decoding in turn, cell by cell, kept as they are measured.

A group of prompts is one turn of everybody, in an order that rotates; it is kept whole. Stopped at any
moment, by an interrupt or a deadline, the same settings go on from there. The result is a :class:`Run` of
kind *bench* with all that is known so far.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from workbench.core.build import standalone_engine
from workbench.core.build_weights import build_weights, weights_key
from workbench.core.drafters.contestants import engines, limits_of, planned, recipes
from workbench.core.drafters.costs import ROUNDS, Costs, Padded
from workbench.core.drafters.known import Group, Known, code_digest
from workbench.core.drafters.prompt_sets import PromptSet, read_prompts
from workbench.core.drafters.settings import PLAIN, Cell, DrafterSettings
from workbench.core.drafters.summary import Measured, summary
from workbench.core.drafters.turns import Step, Turn, take_turn
from workbench.core.plan import ModelFacts
from workbench.core.verify_cost import ANY_DRAFTER
from workbench.engine.params import SamplingParams
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.models.source import Source
from workbench.models.tokenizer import Tokenizer, load_tokenizer
from workbench.spec.errors import PlanError
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

Tell = Callable[[float, float, str], None]


def run_drafters(
    settings: DrafterSettings,
    tell: Tell = lambda done, total, message: None,
    folder: Path | None = None,
) -> Run:
    """Measure what is not known yet, here and now; ``folder`` keeps it, by default the cache folder."""
    steps = drafter_steps(settings, tell, folder)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            run: Run = end.value
            return run


def drafter_steps(
    settings: DrafterSettings, tell: Tell, folder: Path | None = None
) -> Generator[None, None, Run]:
    """A generator: one turn of one contestant per ``yield``; returns the :class:`Run`.

    Raises :class:`OptionError` for settings that name what does not exist, and :class:`PlanError` where no
    drafter fits a cell.
    """
    began = monotonic()
    cells = settings.chosen()
    source, tokenizer = open_source(settings.model), load_tokenizer(settings.model)
    bench = _Bench(settings, source, tokenizer, Known(settings, _facts(settings, source), folder))
    measured = [bench.opened(cell) for cell in cells]
    total = sum(m.missing * len(m.plans) for m in measured) or 1
    done = 0

    def report(what: str) -> None:
        tell(min(done, total), total, what)

    def in_time() -> bool:
        return not settings.deadline_s or monotonic() - began < settings.deadline_s

    for m in measured:
        for _ in bench.measure(m, report, in_time):
            done += 1
            yield
    return summary(settings, bench.facts, measured, bench.notes(measured, in_time()))


class _Bench:
    """What all cells share: the model, one set of weights at a time, and what is on disk."""

    def __init__(self, settings: DrafterSettings, source: Source, tokenizer: Tokenizer, known: Known) -> None:
        self.settings, self.source, self.tokenizer, self.known = settings, source, tokenizer, known
        self.facts = known.facts
        self.recipes = recipes(settings, self.facts)
        self._left_out: dict[str, None] = {}
        self._sets: dict[str, PromptSet] = {}
        self._decoder: tuple[Any, Decoder] | None = None

    def opened(self, cell: Cell) -> Measured:
        """A cell with its prompts, its plans, and all that is known of it."""
        prompts = self._set(cell.prompts)
        turns = cell.turns(self.settings.size("prompts"))
        asked = [tuple(p.ids for p in prompts.group(n, cell.group)) for n in range(turns)]
        limits = limits_of(
            [ids for group in asked for ids in group],
            self.settings.size("tokens"),
            cell,
            self.source.config.max_position,
        )
        plans: dict[str, Plan] = {}
        for name, recipe in self.recipes.items():
            try:
                plans[name] = planned(recipe, cell, self.settings, self.facts, limits)
            except PlanError as error:
                if name == PLAIN or len(self.recipes) == 2:
                    raise
                self._left_out[f"{cell.label} without {name}: {error.message}"] = None
        groups = [self.known.groups.get(self.known.group_key(cell, plans, ids)) for ids in asked]
        costs = self.known.costs.get(self.known.costs_key(cell, plans[PLAIN]))
        return Measured(cell, plans, asked, groups, costs)

    def measure(
        self, m: Measured, report: Callable[[str], None], in_time: Callable[[], bool]
    ) -> Generator[None, None, None]:
        """Measure what is missing of a cell, a turn of a contestant per ``yield``; begins none too late."""
        label = m.cell.label
        m.costs = m.costs or self.known.costs.get(self.known.costs_key(m.cell, m.plans[PLAIN]))
        if (m.costs is not None and not m.missing) or not in_time():
            return
        report(f"{label}: weights")
        decoder = self._weights(m.plans[PLAIN], lambda _, what: report(f"{label}: {what}"))
        if m.costs is None:
            m.costs = self._costs(m.cell, decoder, report)
        if not m.missing or not in_time():
            return
        settings = self.settings
        params = SamplingParams(max_tokens=settings.size("tokens"), temperature=settings.temperature)
        with engines(m.plans, decoder, self.tokenizer.eos_ids) as made:
            for name, engine in made.items():
                report(f"{label}: {name} warms up")
                first = m.prompts[0][: m.cell.batch]
                take_turn(engine, first, m.cell.batch, SamplingParams(max_tokens=8, ignore_eos=True))
            names = list(made)
            for number, ids in enumerate(m.prompts):
                if m.groups[number] is not None or not in_time():
                    continue
                turns: dict[str, Turn] = {}
                shift = number % len(names)
                for name in (*names[shift:], *names[:shift]):
                    report(f"{label}, turn {number + 1} of {len(m.prompts)}: {name}")
                    turns[name] = take_turn(made[name], ids, m.cell.batch, params)
                    if len(turns) == len(names):
                        m.groups[number] = group = Group({n: turns[n] for n in names}, code_digest())
                        self.known.groups.put(self.known.group_key(m.cell, m.plans, ids), group)
                    yield

    def notes(self, measured: Sequence[Measured], in_time: bool) -> list[str]:
        """What a reader must know: what is missing, what was left out, which code ran."""
        groups = [g for m in measured for g in m.groups]
        missing = sum(g is None for g in groups)
        out = []
        if missing:
            why = "" if in_time else f", the deadline of {self.settings.deadline_s:g} s came first"
            out.append(f"{missing} of {len(groups)} turns are not measured{why}: the same command goes on")
        older = sum(g is not None and g.code != code_digest() for g in groups)
        if older:
            out.append(f"{older} of {len(groups)} turns were measured with other code: --fresh repeats them")
        for s in self._sets.values():
            out += [f"{s.name}: {s.too_long} prompts are too long"] * bool(s.too_long)
            out += [f"{s.name}: {s.too_short} prompts have fewer than two tokens"] * bool(s.too_short)
        if self.known.trouble:
            out.append(f"turns were not kept: {self.known.trouble}")
        return out + list(self._left_out)

    def _set(self, prompts: str) -> PromptSet:
        if prompts not in self._sets:
            self._sets[prompts] = read_prompts(prompts, self.tokenizer, self.settings.size("longest"))
        return self._sets[prompts]

    def _weights(self, plan: Plan, progress: Callable[[float, str], None]) -> Decoder:
        key = weights_key(plan)
        if self._decoder is None or self._decoder[0] != key:
            self._decoder = None  # one set at a time
            with torch.inference_mode():
                made = Decoder(self.source.config, build_weights(plan, self.source, progress))
            self._decoder = (key, made)
        return self._decoder[1]

    def _costs(self, cell: Cell, decoder: Decoder, report: Callable[[str], None]) -> Costs:
        how = Padded.fitting(cell.batch, self.source.config.max_position)
        one = planned(Recipe.of(ANY_DRAFTER), cell, self.settings, self.facts, how.limits)
        engine = standalone_engine(one, decoder)
        steps: list[Step] = []
        for turn, found in enumerate(how.turns(engine)):
            steps += found
            report(f"{cell.label}: cost of rows, turn {turn} of {ROUNDS}")
        costs = Costs.of(cell.batch, steps)
        plain = planned(Recipe(), cell, self.settings, self.facts, how.limits)
        self.known.costs.put(self.known.costs_key(cell, plain), costs)
        return costs


def _facts(settings: DrafterSettings, source: Source) -> ModelFacts:
    return ModelFacts(settings.model, source.config, source.fingerprint)
