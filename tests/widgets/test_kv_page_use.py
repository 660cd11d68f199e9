"""What paging is worth: use of slots from bytes really held, hits from tokens not computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from workbench.core.session import Session
from workbench.spec.errors import OptionError
from workbench.spec.recipe import Recipe
from workbench.widgets.kv_views import measure_hits, measure_use

PAGED = Recipe.of("paged:page_size=16", "prefix_cache")


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    with Session("tiny", PAGED, dtype="float32") as session:
        yield session


def test_use_follows_from_lengths_and_page_size(tiny: Any) -> None:
    lengths = [[17, 33, 40]]
    use = measure_use(tiny, lengths, (16, 64), max_tokens=2)
    assert list(use.runs) == ["contiguous", "16", "64"]
    filled = sum(n + 1 for n in lengths[0])  # the token chosen last is never written
    for size in (16, 64):
        slots = sum(-(-(n + 1) // size) * size for n in lengths[0])
        assert use.shares(str(size)) == pytest.approx([filled / slots], abs=1e-3)
    assert use.shares("contiguous")[0] < 0.05
    assert tiny.recipe == PAGED
    text = use.table().to_text()
    assert "1 batch of 3 prompts" in text and "measured" in text
    assert len(use.figure("dark").data) == 3


def test_a_hit_leaves_the_last_page_to_compute(tiny: Any) -> None:
    hits = measure_hits(tiny, list(range(5, 105)), repeats=2)
    assert (hits.prompt, hits.cached) == (100, 96)
    assert len(hits.cold_ms) == len(hits.warm_ms) == 2 and min(hits.cold_ms + hits.warm_ms) > 0
    assert [row[1] for row in hits.table().rows] == [100, 4]


def test_without_a_prefix_cache_or_batches_there_is_nothing_to_measure(tiny: Any) -> None:
    with pytest.raises(OptionError, match="lengths"):
        measure_use(tiny, [[]])
    tiny.apply(Recipe()).result()
    with pytest.raises(OptionError, match="Switch on"):
        measure_hits(tiny, [1, 2, 3])
    tiny.apply(PAGED).result()
