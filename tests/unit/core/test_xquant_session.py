"""The schedule of a session's model, as data and tables."""

from __future__ import annotations

import json

import pytest

from workbench.core.xquant_session import submit_sharing
from workbench.spec.errors import PlanError, RecipeError
from workbench.spec.recipe import Recipe

WAIT = 120


def test_schedule_and_measurements_are_data(open_session):
    session = open_session()
    found = submit_sharing(session, Recipe.of("paged", "xquant:residual=32,target=1.6")).result(WAIT)
    data = json.loads(json.dumps(found.to_dict()))
    layers = session.facts.config.num_layers
    assert len(found.rows()) == layers and len(found.pairs()) == 2 * (layers // 2)
    assert data["code_bits"] <= 1.6 and data["metadata_bits"] == 1.0 and "3 x" in data["origin"]
    shared = [r for r in found.rows() if r["k_codes_of"] is not None or r["v_codes_of"] is not None]
    assert shared and all(r["layer"] % 2 == 1 for r in shared)
    assert session.generate("Hello", max_tokens=2).token_ids


def test_what_needs_no_measuring_has_none(open_session):
    found = submit_sharing(open_session(), Recipe.of("xquant:schedule=paper,km=1")).result(WAIT)
    assert found.harm is None and found.pairs() == [] and found.to_dict()["origin"] == ""
    assert any(r["k_codes_of"] == 0 for r in found.rows())


def test_other_recipes_are_refused_at_once(open_session):
    session = open_session()
    with pytest.raises(RecipeError, match="shares no codes"):
        submit_sharing(session, Recipe.of("kivi"))
    with pytest.raises(PlanError):
        submit_sharing(session, Recipe.of("xquant", "kv_int8"))
