"""Planning: conflicts with remedies, negotiated page sizes, limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from workbench.core import catalog
from workbench.core.plan import matrix, pair_recipe, plan, require, why_not
from workbench.spec.errors import OptionError, PlanError, UnknownTechnique
from workbench.spec.plan import Conflict, EngineLimits, Plan
from workbench.spec.recipe import Recipe


@pytest.fixture(scope="module")
def facts(lab):
    return lab._facts("llama")


def made(facts, *uses, **where) -> Plan:
    return require(plan(Recipe.of(*uses), facts, **where))


def conflicts(facts, *uses, **where) -> list[Conflict]:
    result = plan(Recipe.of(*uses), facts, **where)
    assert isinstance(result, list)
    for c in result:
        assert c.remedy.endswith((".", ")")) or " " in c.remedy
        assert c.first in {u.id for u in Recipe.of(*uses)}
    return result


def test_the_empty_recipe_is_the_plain_engine(facts):
    p = made(facts)
    assert (p.kind, p.page_size, p.dtype, p.numerics) == ("exact", 64, "bfloat16", "fast")
    assert p.limits.max_context == 256  # the model's own
    assert "reserves 256 slots" in " ".join(p.notes)


@pytest.mark.parametrize(
    ("uses", "second", "resource"),
    [
        (("paged", "kv_int8", "kivi"), "kv_int8", "kv_format"),
        (("reference", "sdpa"), "reference", "attention"),
        (("prefix_cache",), "engine", "paged"),
        (("verify",), "engine", "drafter"),
        (("paged:page_size=16", "kivi"), "paged", "page size"),
    ],
)
def test_conflicts_name_both_sides_the_resource_and_a_remedy(facts, uses, second, resource):
    found = conflicts(facts, *uses)
    assert (second, resource) in {(c.second, c.resource) for c in found}
    with pytest.raises(PlanError) as err:
        require(found)
    assert err.value.conflicts == tuple(found)
    assert all(c.remedy in str(err.value) for c in found)


def test_all_conflicts_are_told_at_once(facts):
    found = conflicts(facts, "prefix_cache", "verify", "kv_int8", "kv_fp8")
    assert {c.resource for c in found} == {"paged", "drafter", "kv_format"}


def test_remedies_name_what_to_switch_on_as_it_is_titled(facts):
    found = {c.resource: c.remedy for c in conflicts(facts, "kvtc")}
    named = ("paged", "prefix_cache", "radix_cache", "draft_model", "mtp", "eagle3")
    titles = {i: catalog.get(i).spec.title for i in named}
    assert found["paged"].startswith(f"Switch on {titles['paged']}: ")
    assert found["prefix_cache"].startswith(
        f"Switch on {titles['prefix_cache']} or {titles['radix_cache']}: "
    )
    assert conflicts(facts, "fused_round")[0].remedy.startswith(
        f"Switch on {titles['draft_model']}, {titles['mtp']} or {titles['eagle3']}: "
    )
    assert conflicts(facts, "verify")[0].remedy.startswith("Switch on a drafter: ")


def test_the_codecs_page_size_wins_unless_paged_asks_for_another(facts):
    assert made(facts, "paged", "kivi").page_size == 128
    assert made(facts, "paged", "kivi:residual=32").page_size == 32
    assert made(facts, "paged:page_size=32", "kivi:residual=32").page_size == 32
    assert made(facts, "paged:page_size=16").page_size == 16
    assert made(facts, "kivi").page_size == 128


def test_a_format_the_head_size_cannot_hold_is_a_conflict_not_a_crash(facts):
    odd = replace(facts, config=replace(facts.config, head_dim=24))
    codecs = [t.id for t in catalog.all_techniques() if t.spec.seam == "kv_codec"]
    results = [plan(Recipe.of("paged", id), odd) for id in codecs]
    refused = [result for result in results if not isinstance(result, Plan)]
    assert refused and all(any(c.second in ("model", "paged") for c in result) for result in refused)


def test_one_lossy_technique_makes_the_plan_lossy(facts):
    told = set()
    for technique in catalog.all_techniques():
        result = plan(pair_recipe(technique.id), facts)
        if isinstance(result, Plan):
            kinds = {catalog.get(u.id).spec.kind for u in result.recipe}
            assert result.kind == ("lossy" if "lossy" in kinds else "exact")
            told.add(result.kind)
    assert told == {"lossy", "exact"}


def test_why_not_is_empty_exactly_when_it_can_be_switched_on(facts):
    recipe = Recipe.of("paged", "kv_int8")
    for technique_id in catalog.MODULES:
        reasons = why_not(recipe, technique_id, facts)
        assert (reasons == []) == isinstance(plan(recipe.with_(technique_id), facts), Plan)
    assert why_not(recipe, "ngram", facts) == []
    assert [c.second for c in why_not(recipe, "kivi", facts)] == ["kv_int8"]


def test_the_matrix_has_every_pair_once(facts):
    table = matrix(facts)
    n = len(catalog.MODULES)
    assert len(table) == n * (n - 1) // 2
    assert table["kv_fp8", "kv_int8"]
    assert table["prefix_cache", "ngram"] == []


@pytest.mark.parametrize(
    "limits",
    [
        EngineLimits(kv_pool_tokens=0),
        EngineLimits(max_sequences=0),
        EngineLimits(max_batch_tokens=-1),
        EngineLimits(max_context=-1),
        EngineLimits(max_context=257),
        EngineLimits(kv_pool_tokens="many"),
        EngineLimits(max_sequences=1.5),
        "x",
        0,
    ],
    ids=str,
)
def test_limits_that_cannot_be_are_refused(facts, limits):
    with pytest.raises(OptionError):
        plan(Recipe(), facts, limits=limits)


@pytest.mark.parametrize(
    "where",
    [{"dtype": "float16"}, {"dtype": None}, {"numerics": "exact"}, {"device": "gpu"}, {"device": 3.5}],
    ids=str,
)
def test_settings_that_do_not_exist_are_refused(facts, where):
    with pytest.raises(OptionError):
        plan(Recipe(), facts, **where)


def test_an_unknown_technique_is_refused_before_anything_is_planned(facts):
    with pytest.raises(UnknownTechnique):
        plan(Recipe.of("paged", "pagedd"), facts)


def test_plans_are_plain_data(facts):
    p = made(facts, "paged", "ngram:k=4")
    data = p.to_dict()
    assert "configs" not in data
    assert Recipe.from_json(data["recipe"]) == p.recipe
    assert p == made(facts, "paged", "ngram:k=4")


def test_a_group_that_does_not_divide_the_head_size_is_a_conflict_of_the_plan(facts):
    odd = replace(facts, config=replace(facts.config, head_dim=80))
    (found,) = conflicts(odd, "kivi")
    assert (found.first, found.second, found.resource) == ("kivi", "model", "head size")
    assert "does not divide the head size 80" in found.remedy
    assert why_not(Recipe(), "kivi", odd) == [found]
    assert made(odd, "kivi:group=16").page_size == 128


def test_fp4_blocks_that_do_not_divide_a_head_are_a_conflict_of_the_plan(facts):
    odd = replace(facts, config=replace(facts.config, head_dim=96))
    (found,) = conflicts(odd, "kv_fp4:format=mxfp4")
    assert (found.first, found.second, found.resource) == ("kv_fp4", "model", "head size")
    assert "multiple of 64" in found.remedy and "kv_int8" in found.remedy
    assert made(odd, "kv_fp4:format=nvfp4").page_size
