"""Every pair of techniques: a declared conflict with its remedy, or a composition that keeps both promises.

The promise, in pinned float64 and bit for bit: an exact technique adds nothing, so a pair equals what its
lossy members (and the attention form, which decides the order of sums) give alone; two exact ones equal the
plain run. Two lossy members have no third party to equal; they must differ from each alone and reproduce.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.core import catalog
from workbench.core.plan import ModelFacts, matrix, pair_conflicts, pair_recipe, plan
from workbench.spec.plan import Conflict, Plan
from workbench.spec.recipe import Recipe

PAIRS = list(combinations(catalog.MODULES, 2))
Outcome = tuple[tuple[tuple[int, ...], tuple[float | None, ...]], ...]


def facts(lab: ModuleType, family: str) -> ModelFacts:
    return ModelFacts(family, lab.random_source(family).config)


def lossy(id: str) -> bool:
    """Whether numbers differ once it is on; KV at rest is read only when a pool was full: here is room."""
    spec = catalog.get(id).spec
    return spec.kind != "exact" and spec.seam != "kv_storage"


def decides_bits(id: str) -> bool:
    """Whether numbers may differ once it is on: lossy, or another order of summing."""
    return lossy(id) or catalog.get(id).spec.seam == "attention"


@cache
def outcome(lab: ModuleType, recipe: Recipe, family: str, temperature: float = 0.0) -> Outcome:
    """Ids and log-probabilities of three ragged prompts in one batch, each twice: the second time warm."""
    gen = torch.Generator().manual_seed(5)
    piece = torch.randint(0, lab.VOCAB, (21,), generator=gen).tolist()
    prompts = [(piece * 8)[:n] for n in (140, 30, 3)]
    made = lab.make_engine(*lab.acting(recipe), family=family)
    kept = []
    for _ in range(2):
        ran = lab.run_engine(made, prompts, max_tokens=8, logprobs=0, temperature=temperature, seed=3)
        kept.append(
            tuple((tuple(ran.ids(f"r{i}")), tuple(ran.logprobs(f"r{i}"))) for i in range(len(prompts)))
        )
    made.kv.check()
    assert kept[0] == kept[1]
    return kept[0]


def check_pair(lab: ModuleType, first: str, second: str, family: str) -> None:
    recipe = pair_recipe(first, second)
    conflicts = pair_conflicts(first, second, facts(lab, family), dtype="float64", numerics="pinned")
    if conflicts:
        check_conflicts(first, second, conflicts)
        return
    losing = [u.id for u in recipe if lossy(u.id)]
    alone = pair_recipe(*(u.id for u in recipe if decides_bits(u.id)))
    drafting = any(catalog.get(u.id).spec.seam == "drafter" for u in recipe)
    # Above temperature 0 a drafter keeps the law, not the draws.
    for temperature in (0.0,) if drafting else (0.0, 0.8):
        together = outcome(lab, recipe, family, temperature)
        if len(losing) < 2:
            assert together == outcome(lab, alone, family, temperature)
        else:
            for id in losing:
                if all(catalog.get(other).spec.seam == "verify" for other in losing if other != id):
                    continue  # a lossy rule differs only where a draft tempts it
                assert together != outcome(lab, pair_recipe(id), family, temperature)
    assert all(p is not None and p <= 0 for _, scores in together for p in scores)


def check_conflicts(first: str, second: str, conflicts: list[Conflict]) -> None:
    """A conflict names the parties and says in a sentence what to do."""
    for c in conflicts:
        assert {c.first, c.second} & {first, second}
        assert c.resource and len(c.remedy.split()) >= 4 and c.remedy.rstrip()[-1] in ".)'"


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda v: v)
def test_pair_keeps_both_promises_or_declares_its_conflict(lab: ModuleType, first: str, second: str) -> None:
    check_pair(lab, first, second, "llama")


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda v: v)
def test_pair_on_every_family(lab: ModuleType, first: str, second: str, family: str) -> None:
    check_pair(lab, first, second, family)


def test_sliding_windows_compose_with_what_cuts_and_shares_blocks(lab: ModuleType) -> None:
    """The family with the most to go wrong, on the pairs that cut and share; all others nightly."""
    ids = [
        i for i in catalog.MODULES if catalog.get(i).spec.seam in ("prefix", "scheduler", "drafter", "pages")
    ]
    for first, second in combinations(ids, 2):
        check_pair(lab, first, second, "gemma3")


def test_everything_exact_at_once_is_the_plain_run(lab: ModuleType) -> None:
    """As many exact techniques as fit together, in catalogue order."""
    recipe = Recipe()
    for id, technique in ((i, catalog.get(i)) for i in catalog.MODULES):
        if technique.spec.kind != "exact" or technique.spec.seam == "attention":
            continue
        if id in recipe:
            continue
        candidate = pair_recipe(*(u.id for u in recipe), id)
        if isinstance(fit(lab, candidate), Plan):
            recipe = candidate
    assert len(recipe) >= 4
    assert outcome(lab, recipe, "llama") == outcome(lab, Recipe(), "llama")


def fit(lab: ModuleType, recipe: Recipe) -> Any:
    return plan(recipe, facts(lab, "llama"), dtype="float64", numerics="pinned")


def test_matrix_has_every_pair_and_conflicts_do_not_depend_on_order(lab: ModuleType) -> None:
    made = matrix(facts(lab, "llama"))
    assert set(made) == set(PAIRS)
    for (first, second), conflicts in made.items():
        backwards = pair_conflicts(second, first, facts(lab, "llama"))
        assert sorted(c.resource for c in backwards) == sorted(c.resource for c in conflicts)


def test_a_pair_that_claims_one_slot_is_in_conflict(lab: ModuleType) -> None:
    """Slots are read from the specs here, and compared with what planning says."""
    shared = {
        pair
        for pair in PAIRS
        if set(catalog.get(pair[0]).spec.claims_slot) & set(catalog.get(pair[1]).spec.claims_slot)
    }
    assert shared
    refused = {pair for pair, conflicts in matrix(facts(lab, "llama")).items() if conflicts}
    assert shared <= refused
