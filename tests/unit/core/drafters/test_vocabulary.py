"""Coverage of a head's list: what it is of, by hand, and on the shipped heads."""

from __future__ import annotations

import pytest

from workbench.core.drafters.contestants import heads_of
from workbench.core.drafters.vocabulary import Covered, coverage, drafted_size, list_of
from workbench.core.plan import ModelFacts
from workbench.models.registry import open_source
from workbench.spec.recipe import Recipe


def test_coverage_counts_tokens_not_kinds_of_tokens() -> None:
    ids, answers = [7, 3, 9], [[7, 7, 3], [5, 9]]
    assert coverage(ids, answers, [1, 2, 3, 99]) == [0.4, 0.6, 0.8, 0.8]
    assert coverage(ids, [], [2]) == [0.0]


@pytest.mark.parametrize(
    ("use", "size"), [("eagle3", 1000), ("eagle3:vocab=64", 64), ("eagle3:vocab=0", None), ("ngram", None)]
)
def test_how_many_tokens_a_recipe_drafts_from(use: str, size: int | None) -> None:
    assert drafted_size(Recipe.of("paged", use), 1000) == size


def test_every_head_of_a_recipe_is_found_with_its_list() -> None:
    source = open_source("tiny")
    facts = ModelFacts("tiny", source.config, source.fingerprint)
    for recipe, kinds in (("eagle3", ["eagle3"]), ("hybrid:head=medusa", ["medusa"]), ("ngram", [])):
        found = heads_of(Recipe.of("paged", recipe), facts)
        assert [h.kind for h in found] == kinds
        for head in found:
            listed = list_of(head)
            assert len(set(listed)) == len(listed) > 100


@pytest.mark.parametrize(
    ("size", "share", "enough"), [(8192, 0.97, True), (8192, 0.96, False), (4096, 0.5, None)]
)
def test_a_list_of_8192_should_cover_97_percent(size: int, share: float, enough: bool | None) -> None:
    found = Covered("chat_b1", "eagle3", size, share)
    assert found.enough is enough
    assert found.metric().name == f"chat_b1:eagle3:coverage_{size}" and found.metric().value == share
