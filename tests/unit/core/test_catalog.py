"""The catalogue and normalised recipes."""

from __future__ import annotations

import pytest

from workbench.core import catalog
from workbench.core.kv_storage_methods import STORAGE
from workbench.spec.errors import OptionError, RecipeError, UnknownTechnique
from workbench.spec.recipe import Recipe, Use
from workbench.spec.technique import options_of


@pytest.mark.parametrize("technique_id", list(catalog.MODULES))
def test_every_entry_loads_under_its_own_name(technique_id):
    technique = catalog.get(technique_id)
    assert technique.id == technique_id == catalog.MODULES[technique_id].rpartition(".")[2]
    assert technique.configure({}) == technique.config()
    for option in technique.options:
        assert option.check(option.default, technique_id) == option.default
        assert option.help


def test_an_unknown_id_names_the_close_ones():
    with pytest.raises(UnknownTechnique, match="kivi"):
        catalog.get("kivy")
    with pytest.raises(UnknownTechnique, match="Known: paged"):
        catalog.get("zzzzzz")


@pytest.mark.parametrize(
    ("use", "named"),
    [
        ("kivi:bits=3", "bits = 3"),
        ("kivi:depth=1", "depth"),
        ("ngram:k=0", "k = 0"),
        ("ngram:k=2.5", "k = 2.5"),
        ("ngram:k=true", "k = True"),
        ("ngram:k=many", "k = 'many'"),
        ("verify:rule=r9", "rule = 'r9'"),
        ("chunked_prefill:budget=1e999", "budget"),
    ],
)
def test_bad_options_are_named_with_the_way_out(use, named):
    with pytest.raises(OptionError) as err:
        catalog.normalise(Recipe.of(use))
    assert named in str(err.value)
    assert catalog.check_options(Use.parse(use)) == str(err.value)


@pytest.mark.parametrize(
    ("use", "instead"),
    [
        ("kvtc:ratio=8", "k_ratio and v_ratio"),
        ("cachegen:bins=32/16/16", "level"),
        ("cachegen:k=64", "level"),
    ],
)
def test_an_option_of_the_measured_method_is_told_from_the_techniques(use, instead):
    with pytest.raises(OptionError) as err:
        catalog.normalise(Recipe.of(use))
    assert f"--method {use}" in err.value.hint and f"a recipe has {instead} instead" in err.value.hint
    known = {o.name for o in catalog.get(Use.parse(use).id).options}
    assert set(instead.split(" and ")) <= known


@pytest.mark.parametrize("technique_id", [t.id for t in catalog.all_techniques() if t.spec.method_only])
def test_what_only_the_method_takes_the_method_takes(technique_id):
    storage = STORAGE[technique_id]
    taken = {o.name for o in options_of(storage.config)} | set(storage.aliases)
    spec = catalog.get(technique_id).spec
    assert set(spec.method_only) <= taken
    assert not set(spec.method_only) & {o.name for o in catalog.get(technique_id).options}


def test_recipes_that_mean_the_same_become_equal():
    kivi = catalog.get("kivi")
    defaults = {o.name: o.default for o in kivi.options}
    spelled = Recipe((Use.of("kivi", **defaults), Use.of("ngram", k=4.0)))
    short = Recipe.of("kivi", "ngram:k=4")
    assert catalog.normalise(spelled) == catalog.normalise(short)
    assert catalog.normalise(spelled).key == catalog.normalise(short).key
    assert catalog.normalise(spelled).to_json() == [{"id": "kivi"}, {"id": "ngram", "k": 4}]
    assert catalog.normalise(catalog.normalise(spelled)) == catalog.normalise(spelled)


@pytest.mark.parametrize("recipe", ["paged", None, 5, ["paged"], {"uses": []}])
def test_what_is_no_recipe_is_refused(recipe):
    with pytest.raises(RecipeError):
        catalog.normalise(recipe)


@pytest.mark.parametrize("text", ["ngram:k=3,k=4", '{"id": "ngram", "k": 3, "k": 4}'])
def test_an_option_given_twice_is_refused(text):
    with pytest.raises(RecipeError, match="twice"):
        Recipe.of(text)
