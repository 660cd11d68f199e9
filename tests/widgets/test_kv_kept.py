"""The map of kept tokens: what is drawn is what the engine kept; random selection as a measured baseline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from workbench.core.quality_windows import QualitySettings
from workbench.core.session import Session
from workbench.spec.errors import OptionError, RecordError
from workbench.spec.recipe import Recipe
from workbench.widgets.kv_views import keep_random, kept_tokens, measure_points
from workbench.widgets.kv_views.kept_map import BINS, KeptTokens

HEADS = {0: ((0, 1, 4), (0, 2, 3)), 3: ((0, 1, 4), (0, 1, 4))}


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    with Session("tiny", dtype="float32") as session:
        yield session


def test_bins_hold_the_share_kept_and_rows_are_layers_and_heads() -> None:
    made = KeptTokens("m", 5, {"a": HEADS})
    assert [name for name, _ in made.rows("a")] == [
        "layer 0, head 0", "layer 0, head 1", "layer 3, head 0", "layer 3, head 1",
    ]  # fmt: skip
    assert made.binned("a")[0] == [1, 1, 0, 0, 1]
    tokens = tuple(range(0, 2 * BINS + 1, 3))  # one of three, and the last token, which has a bin of its own
    (row,) = KeptTokens("m", 2 * BINS + 1, {"a": {0: (tokens,)}}).binned("a")
    assert len(row) <= BINS
    assert set(row[:-1]) == {0.333} and row[-1] == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_slider_changes_the_method(theme: Any) -> None:
    made = KeptTokens("m", 5, {"a": HEADS, "b": {0: ((0, 1), (2, 3)), 3: ((0, 1), (2, 3))}})
    figure = json.loads(made.figure(theme).to_json())
    assert [t["visible"] for t in figure["data"]] == [True, False]
    assert [s["label"] for s in figure["layout"]["sliders"][0]["steps"]] == ["a", "b"]
    assert figure["data"][1]["z"][1] == [0, 0, 1, 1, 0]
    assert "sliders" not in json.loads(KeptTokens("m", 5, {"a": HEADS}).figure(theme).to_json())["layout"]


def test_the_table_counts_sinks_and_agreement() -> None:
    row = KeptTokens("m", 5, {"a": HEADS}).table().to_dicts()[0]
    assert row["kept"] == "60.0%"
    assert row["of the first 4"] == "56%"  # 2, 3, 2 and 2 of 4
    assert row["heads agree"] == f"{(3 * 1.0 + 3 * 0.2) / 6:.2f}"


def test_of_a_real_engine_budgets_hold_and_the_recipe_comes_back(tiny: Any) -> None:
    methods = {"half": "snapkv:keep=0.5", "few": "streaming_llm:keep=0.25", "own": "adacurdkv:keep=0.5"}
    made = kept_tokens(tiny, methods, list(range(3, 163)))
    assert tiny.recipe == Recipe()
    for name, share in (("half", 0.5), ("few", 0.25)):
        assert {len(tokens) for _, tokens in made.rows(name)} == {round(share * 160)}
        for _, tokens in made.rows(name):
            assert list(tokens) == sorted(set(tokens)) and tokens[:4] == (0, 1, 2, 3) and tokens[-1] == 159
    layer = [len(tokens) for _, tokens in made.rows("own")[:2]]
    assert sum(layer) == 160 and "measured" in made.table().to_text()
    (only,) = {tokens for _, tokens in made.rows("few")}
    assert only == (*range(4), *range(124, 160))


def test_formats_are_no_selectors_and_short_contexts_lose_nothing(tiny: Any) -> None:
    with pytest.raises(OptionError, match="keeps everything"):
        kept_tokens(tiny, ["kv_fp8"], list(range(3, 100)))
    assert tiny.recipe == Recipe()
    with pytest.raises(RecordError, match="longer"):
        KeptTokens("m", 5, {"a": {}})


def test_random_selection_is_measured_like_a_selector(tiny: Any) -> None:
    settings = QualitySettings(context=128, score=16, windows=1, greedy=0)
    one, other = (keep_random(tiny, settings, keep=0.5, recent=16, seed=seed) for seed in (1, 2))
    found = measure_points(tiny, {"random": one, "again": one, "other": other}, settings)
    assert found[0].kl == found[1].kl != found[2].kl
    assert found[0].kl > 0 and 1.9 < found[0].whole < 2.1
