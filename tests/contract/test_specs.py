"""Every technique's description is data, complete, and means the same after a round trip."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest

from workbench.core import catalog
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe, Use
from workbench.spec.technique import Option, TechniqueSpec, options_of

IDS = list(catalog.MODULES)
KINDS = {"exact", "lossy", "simulated"}
DEVICES = {"cpu", "cuda", "triton"}


def is_data(value: object) -> bool:
    """Nothing but scalars, tuples, mappings with text keys, and frozen records of these."""
    if dataclasses.is_dataclass(value):
        return all(is_data(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_data(v) for k, v in value.items())
    if isinstance(value, tuple):
        return all(is_data(v) for v in value)
    return isinstance(value, bool | int | float | str)


def samples(option: Option) -> list[Any]:
    """Values of an option that must be accepted: its default, its ends, every choice."""
    ends = [option.type(x) for x in (option.low, option.high) if x is not None]
    return [option.default, *option.choices, *ends, *([True, False] if option.type is bool else [])]


def outside(option: Option) -> list[Any]:
    """Values that must be refused."""
    wrong: list[Any] = [math.nan, math.inf] if option.type in (int, float) else []
    wrong += [option.low - 1] if option.low is not None else []
    wrong += [option.high + 1] if option.high is not None else []
    wrong += ["no such choice"] if option.type is not bool else [1, "true"]
    wrong += [[1], None]
    return [w for w in wrong if not (option.type is str and not option.choices and isinstance(w, str))]


@pytest.mark.parametrize("id", IDS)
def test_spec_is_complete_pure_data(id: str) -> None:
    assert not is_data(lambda: None) and not is_data((object(),))
    spec = catalog.get(id).spec
    assert isinstance(spec, TechniqueSpec) and is_data(spec)
    assert json.loads(json.dumps(dataclasses.asdict(spec)))["id"] == id
    assert spec.kind in KINDS and set(spec.backends) <= DEVICES and "cpu" in spec.backends
    for text in (spec.title, spec.summary, spec.family):
        assert text.strip()
    assert spec.summary.rstrip().endswith("."), "a summary is a sentence"
    assert bool(spec.package) == bool(spec.extra), "a package to look for needs an extra that brings it"


@pytest.mark.parametrize("id", IDS)
def test_file_name_is_the_id_and_its_folder_the_family(id: str) -> None:
    module = catalog.MODULES[id].split(".")
    assert module[-1] == id
    assert module[1] == catalog.get(id).spec.family


@pytest.mark.parametrize("id", IDS)
def test_a_source_is_named(id: str) -> None:
    """A link, or author and year."""
    source = re.compile(r"https?://\S+\.\S+|\b(19|20)\d\d\b")
    assert not source.search("see the paper")
    assert source.search(catalog.get(id).spec.paper)


@pytest.mark.parametrize("id", IDS)
def test_claims_have_conditions_and_source(id: str) -> None:
    for claim in catalog.get(id).spec.claims:
        assert all(part.strip() for part in (claim.text, claim.conditions, claim.source))


@pytest.mark.parametrize("id", IDS)
def test_config_is_frozen_and_explains_every_option(id: str) -> None:
    technique = catalog.get(id)
    config = technique.configure({})
    assert is_data(config)
    for option in technique.options:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, option.name, option.default)
        assert option.help.rstrip().endswith("."), f"{id}.{option.name}: help is a sentence"
        if option.type in (int, float):
            bounded = option.choices or (option.low is not None and option.high is not None)
            assert bounded, f"{id}.{option.name}: a slider needs both ends"


@pytest.mark.parametrize("id", IDS)
def test_values_in_range_survive_json_and_the_command_line(id: str) -> None:
    technique = catalog.get(id)
    for option in technique.options:
        for value in samples(option):
            use = Use.of(id, **{option.name: value})
            assert getattr(technique.configure(dict(use.options)), option.name) == value
            for back in (Use.from_json(json.loads(json.dumps(use.to_json()))), Use.parse(use.to_text())):
                assert back == use
                kept = getattr(technique.configure(dict(back.options)), option.name)
                assert kept == value and type(kept) is option.type


@pytest.mark.parametrize("id", IDS)
def test_values_out_of_range_are_refused_by_name(id: str) -> None:
    technique = catalog.get(id)
    for option in technique.options:
        for value in outside(option):
            with pytest.raises(OptionError, match=f"{id}.{option.name}"):
                technique.configure({option.name: value})


@pytest.mark.parametrize("id", IDS)
def test_unknown_option_is_refused_with_the_known_ones(id: str) -> None:
    technique = catalog.get(id)
    with pytest.raises(OptionError, match="no_such_option") as caught:
        technique.configure({"no_such_option": 1})
    assert all(o.name in caught.value.hint for o in technique.options)


@pytest.mark.parametrize("id", IDS)
def test_recipe_round_trip_and_defaults_left_out(id: str) -> None:
    technique = catalog.get(id)
    spelled_out = Use.of(id, **{o.name: o.default for o in technique.options})
    recipe = catalog.normalise(Recipe.of(spelled_out))
    assert recipe == Recipe.of(id) and recipe.key == Recipe.of(id).key
    assert Recipe.from_json(json.dumps(recipe.to_json())) == recipe


@pytest.mark.parametrize("id", IDS)
def test_needs_are_provided_and_conflicts_name_others(id: str) -> None:
    spec = catalog.get(id).spec
    provided = {p for t in catalog.all_techniques() for p in t.spec.provides}
    assert set(spec.needs) <= provided
    assert id not in spec.conflicts and set(spec.conflicts) <= set(IDS)
    assert all(remedy.rstrip().endswith(".") for remedy in spec.conflicts.values())


@pytest.mark.parametrize("id", IDS)
def test_points_of_its_curve_are_options_it_has(id: str) -> None:
    technique = catalog.get(id)
    points = [technique.configure(dict(Use.parse(f"{id}:{text}").options)) for text in technique.spec.sweep]
    assert points and len(set(points)) == len(points)


def test_options_without_metadata_are_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Bare:
        x: int = 1

    with pytest.raises(OptionError, match=r"Bare\.x"):
        options_of(Bare)


@pytest.mark.parametrize(
    ("text", "value"),
    [(".5", 0.5), ("-.5", -0.5), (".5e-3", 0.0005), ("x.5", "x.5"), ("..5", "..5"), (".5x", ".5x")],
)
def test_a_number_may_begin_with_its_point(text, value):
    assert dict(Use.parse(f"hybrid:confidence={text}").options) == {"confidence": value}
