"""``workbench list`` and ``plan``: the catalogue and the planner, said by a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workbench.cli.catalogue import option_range
from workbench.core import catalog
from workbench.core.plan import pair_recipe
from workbench.core.shipped import fitting_model

Command = Callable[..., Any]


def test_list_shows_every_technique_with_its_options(workbench: Command) -> None:
    done = workbench("list", "--json")
    assert done.status == 0 and done.err == ""
    rows = {r["id"]: r for r in done.json["techniques"]}
    assert list(rows) == list(catalog.MODULES)
    for technique in catalog.all_techniques():
        row = rows[technique.id]
        assert (row["kind"], row["seam"]) == (technique.spec.kind, technique.spec.seam)
        assert [x["name"] for x in row["options"]] == [x.name for x in technique.options]
    shown = workbench("list").out
    assert all(f"\n{id} " in f"\n{shown}" for id in rows)


def test_list_of_one_shows_range_unit_and_help(workbench: Command) -> None:
    technique = catalog.get("ngram")
    shown = " ".join(workbench("list", "ngram").out.split())
    for option in technique.options:
        assert option.name in shown and " ".join(option.help.split()[:3]) in shown
    assert "claimed " in shown and "Conditions: " in shown and technique.spec.paper in shown
    assert f"--use ngram:{technique.options[0].name}=" in shown


def test_list_of_one_says_what_it_does_needs_and_claims(workbench: Command) -> None:
    shown = " ".join(workbench("list", "kvtc").out.split())
    spec = catalog.get("kvtc").spec
    assert spec.summary in shown and "lossy: changes results" in shown
    assert "needs paged" in shown and "needs prefix_cache or radix_cache" in shown
    assert all(c.text.rstrip(".") in shown and c.conditions in shown for c in spec.claims)
    assert "ratio is an option of the method" in shown and "k_ratio and v_ratio instead" in shown
    assert "has no options" in workbench("list", "reference").out


def test_list_by_family_and_unknown_id(workbench: Command) -> None:
    families = {r["family"] for r in workbench("list", "--family", "kv", "--json").json["techniques"]}
    assert families == {"kv"}
    done = workbench("list", "kivvi", "--json")
    assert done.status == 2 and done.json["error"] == "UnknownTechnique" and "kivi" in done.json["hint"]


@pytest.mark.parametrize(
    ("option", "shown"),
    [
        ({"choices": [2, 4], "unit": "bit"}, "2|4 bit"),
        ({"low": 1, "high": 64, "unit": "tokens"}, "1–64 tokens"),
        ({"low": 0}, "≥ 0"),
        ({"type": "bool"}, "true|false"),
        ({"type": "str"}, "str"),
    ],
)
def test_ranges_in_a_few_signs(option: dict[str, Any], shown: str) -> None:
    plain = {"choices": [], "low": None, "high": None, "unit": "", "type": "int"}
    assert option_range({**plain, **option}) == shown


def test_plan_says_what_was_negotiated(workbench: Command) -> None:
    done = workbench("plan", "--model", "tiny", "-u", "paged", "-u", "kivi:bits=2", "--json")
    assert done.status == 0
    made = done.json["plan"]
    assert made["recipe"] == [{"id": "paged"}, {"id": "kivi", "bits": 2}]
    assert made["kind"] == "lossy" and made["page_size"] in (32, 64, 128)
    assert "page size" in workbench("plan", "--model", "tiny", "-u", "paged").out


@pytest.mark.parametrize("id", list(catalog.MODULES))
def test_every_technique_can_be_planned_by_name(workbench: Command, id: str) -> None:
    """Alone, or with what the remedy asks for."""
    uses = [x for use in pair_recipe(id) for x in ("-u", use.to_text())]
    model = fitting_model([id])
    done = workbench("plan", "--model", model, *uses, "--json")
    assert done.status == 0 and {"id": id} in done.json["plan"]["recipe"]
    assert done.json["plan"]["kind"] == catalog.get(id).spec.kind
    alone = workbench("plan", "--model", model, "-u", id, "--json")
    assert alone.status == (2 if len(pair_recipe(id)) > 1 else 0)
    assert bool(alone.json.get("hint")) == (alone.status == 2)


def test_conflicts_end_with_status_2_and_remedies(workbench: Command) -> None:
    done = workbench("plan", "--model", "tiny", "-u", "kivi", "-u", "kv_int8", "--json")
    assert done.status == 2 and done.json["error"] == "PlanError"
    (conflict,) = done.json["conflicts"]
    assert {conflict["first"], conflict["second"]} == {"kivi", "kv_int8"}
    assert conflict["remedy"] and conflict["remedy"] in done.json["hint"]
    told = workbench("plan", "--model", "tiny", "-u", "kivi", "-u", "kv_int8")
    assert told.status == 2 and told.out == "" and f"→ {conflict['remedy']}" in told.err


def test_recipe_file_and_use_are_joined(workbench: Command, tmp_path: Path) -> None:
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(["paged", {"id": "kivi", "bits": 2}]))
    extra = ["-u", '{"id": "kivi", "bits": 4, "group": 16}', "-u", "ngram:k=3"]
    done = workbench("plan", "--model", "tiny", "--recipe", file, *extra, "--json")
    assert done.json["plan"]["recipe"] == [
        {"id": "paged"},
        {"id": "kivi", "group": 16},
        {"id": "ngram", "k": 3},
    ]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"{", "RecipeError"),
        (b"\xff\xfe", "RecipeError"),
        (b"3", "RecipeError"),
        (b"[" * 50_000, "RecipeError"),
        (b'["' + b"x" * 70_000 + b'"]', "RecipeError"),
        (b'[{"id": "kivi", "bits": [1]}]', "RecipeError"),
        (b'[{"id": "kivi", "bits": 3}]', "OptionError"),
        (b'["paged", "paged"]', "RecipeError"),
    ],
)
def test_bad_recipe_files_are_refused(workbench: Command, tmp_path: Path, content: bytes, error: str) -> None:
    file = tmp_path / "recipe.json"
    file.write_bytes(content)
    done = workbench("plan", "--model", "tiny", "--recipe", file, "--json")
    assert done.status == 2 and done.json["error"] == error


@pytest.mark.parametrize(
    "arguments",
    [
        ["-u", "kivi", "-u", "kivi:bits=2"],
        ["-u", ""],
        ["-u", "kivi:bits"],
        ["-u", "kivi:nope=1"],
        ["-u", "kivi:bits=1e9"],
        ["--recipe", "absent.json"],
        ["--max-context", "99999999"],
        ["--kv-pool-tokens", "0"],
        ["--threads", "0"],
        ["--dtype", "float16"],
        ["--bogus"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_used_ends_with_status_2(workbench: Command, arguments: list[str]) -> None:
    done = workbench("plan", "--model", "tiny", *arguments, "--json")
    assert done.status == 2
    assert set(done.json) >= {"error", "message", "hint"} and done.json["message"]


def test_unknown_model_has_its_own_status(workbench: Command) -> None:
    done = workbench("plan", "--model", "tinny", "--json")
    assert done.status == 3 and done.json["error"] == "ModelNotFound" and "tiny" in done.json["hint"]
