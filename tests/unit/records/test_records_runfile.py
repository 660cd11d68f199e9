"""A run and its file are the same thing; a file from elsewhere is a run or a typed error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from workbench.records import runfile
from workbench.records.runfile import dump_many, dumps, load_many, loads, run_from_dict
from workbench.spec.errors import RecordError
from workbench.spec.run import Metric, Run

Make = Callable[..., Run]


def test_a_run_survives_its_file_exactly(make_run: Make) -> None:
    run = make_run()
    assert loads(dumps(run)) == run
    assert run_from_dict(json.loads(json.dumps(run.to_dict()))) == run


def test_several_runs_survive_in_order(make_run: Make) -> None:
    runs = [make_run("a" * 32), make_run("b" * 32, steps=0, provenance=None)]
    assert load_many(dump_many(runs)) == runs
    assert load_many(dumps(runs[0])) == runs[:1]


def test_numbers_that_json_lacks_survive(make_run: Make) -> None:
    run = make_run(
        metrics=(Metric("perplexity", math.inf, ""), Metric("kl", math.nan, "nats", spread=(-math.inf, 1.0)))
    )
    text = dumps(run)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = loads(text).metrics
    assert back[0].value == math.inf and math.isnan(back[1].value) and back[1].spread == (-math.inf, 1.0)


def test_500_steps_stay_below_200_kilobytes(make_run: Make) -> None:
    run = make_run(steps=500)
    text = dumps(run)
    assert len(text) <= 200_000
    assert len(text) < len(json.dumps(run.to_dict())) / 3
    assert loads(text) == run


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"state": "perhaps"}, "state"),
        ({"metrics": [{"name": "x"}]}, "metrics"),
        ({"memory": {"weights": "many"}}, "memory"),
        ({"surprise": 1}, "surprise"),
        ({"recipe": 3}, "recipe"),
        ({"outputs": 3}, "outputs"),
        ({"steps": {"rows": 10**9, "columns": {"all": 0}}}, "1000000000"),
        ({"format": 99}, "99"),
    ],
)
def test_a_wrong_field_is_named(make_run: Make, change: dict[str, Any], names: str) -> None:
    data = {**json.loads(dumps(make_run())), **change}
    with pytest.raises(RecordError, match=names):
        loads(json.dumps(data))


@pytest.mark.parametrize(
    "text", ["", "[", "[]", "null", "3", '{"runs": 3}', "[" * 100_000, '{"id": 1}', b"\xff\xfe"]
)
def test_a_file_that_holds_no_runs_is_refused(text: str | bytes) -> None:
    with pytest.raises(RecordError):
        load_many(text)


def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runfile, "MAX_BYTES", 100)
    with pytest.raises(RecordError, match="101 bytes"):
        loads("x" * 101)
