"""Drafters side by side and over the batch: of a real engine, predictions apart from measurements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from workbench.core import catalog
from workbench.core.session import Session
from workbench.spec.errors import OptionError, RecordError
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric
from workbench.widgets.spec_views import batches_of_bench, compare_drafters, drafters_here, measure_batches
from workbench.widgets.spec_views.crossover import BatchGains, Series

PROMPT = "one two three four one two three four one two three four one"


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    limits = EngineLimits(kv_pool_tokens=2048, max_sequences=4)
    with Session("tiny", Recipe.of("paged"), dtype="float32", limits=limits) as session:
        yield session


def test_every_drafter_of_the_catalogue_runs_or_says_why_not(tiny: Any) -> None:
    found = drafters_here(tiny)
    every = {t.id for t in catalog.all_techniques() if t.spec.seam == "drafter"}
    assert {*found.usable, *found.against} == every and {"ngram", "suffix"} <= set(found.usable)
    assert all(found.against.values())
    assert len(found.table()) == len(every)


def test_greedy_text_is_the_plain_runs_and_the_recipe_comes_back(tiny: Any) -> None:
    made = compare_drafters(
        tiny, PROMPT, ["ngram:k=4", ("suffix", "goodput")], repeats=1, max_tokens=24, ignore_eos=True
    )
    assert tiny.recipe == Recipe.of("paged")
    for row in made.table().to_dicts():
        assert row["text"] == "same 24 tokens" and row["badge"] == "○ exact" and row["tag"] == "measured"
    assert list(made.drafted) == ["ngram:k=4", "suffix + goodput"]
    waited = [run.metric("ttft").value for run in (made.drafted["ngram:k=4"][0], made.plain[0])]  # type: ignore[union-attr]
    assert made.first_token("ngram:k=4") == [waited[0] / waited[1]]
    bars, marks = json.loads(made.figure().to_json())["data"]
    assert bars["name"] == "measured" and marks["name"].startswith("predicted")
    assert len(bars["x"]) == 2 and all(x > 0 for x in bars["x"])
    lines = json.loads(made.figure_acceptance().to_json())["data"]
    assert lines[0]["y"][0] == pytest.approx(made.drafted["ngram:k=4"][0].acceptance["survival"][0])


def test_batches_are_measured_at_every_size_and_predicted_from_one(tiny: Any) -> None:
    made = measure_batches(tiny, "ngram:k=3", [PROMPT], batches=(1, 3), tokens=12, repeats=1)
    (series,) = made.series
    assert series.batches == (1, 3) and len(series.predicted) == 2
    assert all(m.value > 0 and m.tag == "measured" for m in series.measured)
    assert "○ exact" in series.judged
    assert tiny.recipe == Recipe.of("paged")
    with pytest.raises(OptionError, match="limits"):
        measure_batches(tiny, "ngram", [PROMPT], batches=(1, 99))


def gains(*values: float) -> Series:
    metrics = tuple(Metric("speedup", v, "×", n=3, spread=(v - 0.1, v + 0.1)) for v in values)
    return Series("toy", (1, 2, 4), metrics, (1.6, 1.1, 0.5), "rule r1, ○ exact")


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_predicted_is_long_dashed_and_measured_solid_with_its_spread(theme: Any) -> None:
    figure = json.loads(BatchGains("toy", (gains(1.5, 1.0, 0.8),)).figure(theme).to_json())
    predicted, measured = figure["data"]
    assert (predicted["line"]["dash"], measured["line"]["dash"]) == ("longdash", "solid")
    assert measured["error_y"]["array"] == pytest.approx([0.1] * 3)
    table = BatchGains("toy", (gains(1.5, 1.0, 0.8),)).table()
    assert "stops paying at 2 (measured), at 2." in table.note and len(table) == 3
    assert "at no size measured (measured)" in BatchGains("toy", (gains(1.5, 1.4, 1.2),)).table().note


def test_a_stored_bench_run_is_read_by_its_batches(tiny: Any) -> None:
    run = tiny.generate(PROMPT, max_tokens=2)
    bench = {
        "name": "decode", "contestants": ["plain", "ngram"],
        "cells": {"b8_c64": {"batch": 8}, "b1_c64": {"batch": 1}, "c512": {"context": 512}},
    }  # fmt: skip
    metrics = tuple(
        Metric(f"b{b}_c64:ngram/plain", v, "×", n=3, spread=(v, v)) for b, v in ((8, 0.7), (1, 1.2))
    )
    stored = replace(run, kind="bench", plan={**run.plan, "bench": bench}, metrics=metrics)
    (series,) = batches_of_bench(stored).series
    assert (series.name, series.batches, [m.value for m in series.measured]) == ("ngram", (1, 8), [1.2, 0.7])
    assert batches_of_bench(stored).figure().data[0].line.dash == "solid"
    with pytest.raises(RecordError, match="bench decode"):
        batches_of_bench(run)


def test_a_stored_comparison_of_drafters_has_its_predictions_beside_it(tiny: Any) -> None:
    run = tiny.generate(PROMPT, max_tokens=2)
    crossings = [
        {"prompts": p, "drafter": "ngram", "batches": [1, 8], "measured": [1.2, 0.7], "predicted": [1.3, 0.9]}
        for p in ("mixed", "chat")
    ]
    metrics = tuple(
        Metric(f"{p}_b{b}:ngram/plain", v, "×", n=3, spread=(v, v))
        for p in ("mixed", "chat") for b, v in ((1, 1.2), (8, 0.7))
    )  # fmt: skip
    bench = {"name": "drafters", "contestants": ["plain", "ngram"], "crossings": crossings}
    found = batches_of_bench(replace(run, kind="bench", plan={**run.plan, "bench": bench}, metrics=metrics))
    assert [(s.name, s.batches, s.predicted) for s in found.series] == [
        ("ngram, mixed", (1, 8), (1.3, 0.9)), ("ngram, chat", (1, 8), (1.3, 0.9)),
    ]  # fmt: skip
    assert {t.line.dash for t in found.figure().data} == {"solid", "longdash"}
