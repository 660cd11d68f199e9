"""How a plan cuts a model's layers into KV groups of one page size, and which of them share a pool."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from workbench.core.kv_groups import draft_group, equal_groups, kv_pools
from workbench.core.plan import ModelFacts, plan, require
from workbench.models.config import KVGroup
from workbench.spec.recipe import Recipe

SLIDING, FULL = "sliding_attention", "full_attention"


def layers(full: int, windowed: int) -> tuple[KVGroup, KVGroup]:
    """A model whose first layers have a window."""
    return KVGroup(tuple(range(windowed)), 8), KVGroup(tuple(range(windowed, windowed + full)), None)


def sizes(groups: tuple[KVGroup, ...]) -> list[tuple[int | None, int]]:
    return [(g.window, len(g.layers)) for g in groups]


@pytest.mark.parametrize(
    ("full", "windowed", "expected"),
    [
        (3, 15, [(8, 3)] * 5 + [(None, 3)]),  # Gemma-3 270M
        (10, 52, [(8, 10)] * 5 + [(8, 2), (None, 10)]),  # Gemma-3 27B
        (12, 12, [(8, 12), (None, 12)]),
        (4, 5, [(8, 5), (None, 4)]),  # a quarter more: one table less is worth an empty layer
        (15, 3, [(8, 3)] + [(None, 3)] * 5),
    ],
)
def test_groups_are_cut_to_the_size_of_the_smallest(full: int, windowed: int, expected: list[Any]) -> None:
    groups = equal_groups(layers(full, windowed))
    assert sizes(groups) == expected
    assert sorted(n for g in groups for n in g.layers) == list(range(full + windowed))


@pytest.mark.parametrize("drafter", [1, 2, 5])
@pytest.mark.parametrize(("full", "windowed"), [(3, 15), (15, 3), (1, 1), (4, 5)])
def test_layers_of_a_drafter_count_with_the_group_that_holds_them(
    full: int, windowed: int, drafter: int
) -> None:
    groups = equal_groups(layers(full, windowed), drafter)
    home = draft_group(groups)
    assert groups[home].window is None
    held = [len(g.layers) + (drafter if i == home else 0) for i, g in enumerate(groups)]
    assert min(map(len, (g.layers for g in groups))) >= 1
    assert sorted(n for g in groups for n in g.layers) == list(range(full + windowed))
    assert max(held) <= max(min(full + drafter, windowed) * 5 // 4, drafter + 1)


def test_a_model_of_one_attention_type_is_one_group() -> None:
    (group, _) = layers(1, 7)
    assert equal_groups([group], 2) == (group,)


@pytest.mark.parametrize(
    ("uses", "pools"),
    [
        (("paged",), (0, 0, 0, 0)),
        (("paged", "kivi:residual=32,group=32"), (0, 0, 0, 0)),
        (("paged", "xquant"), (0, 1)),  # layers read each other's codes: groups stay whole
        (("paged", "adacurdkv"), (0, 1, 1, 1, 1)),  # pages of one head of one layer, and whole ones
    ],
)
def test_groups_whose_pages_are_of_one_size_share_a_pool(
    lab: ModuleType, uses: tuple[str, ...], pools: tuple[int, ...]
) -> None:
    config = lab.random_source("gemma3").config
    types = (SLIDING,) * 3 + (FULL,) + (SLIDING,) * 2 + (FULL,)
    config = replace(config, num_layers=7, layer_types=types)
    made = require(plan(Recipe.of(*uses), ModelFacts("random", config), dtype="float32"))
    assert kv_pools(made, config) == pools
