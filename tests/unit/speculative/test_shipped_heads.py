"""Heads that ship: for the weights that ship, right and wrong often enough to show both, output unchanged."""

from __future__ import annotations

import json
from functools import cache as cache_of_results

import pytest

from workbench.core.session import Session
from workbench.models.datadir import data_dir
from workbench.models.heads import find_head, read_head
from workbench.models.registry import open_source
from workbench.spec.recipe import Recipe
from workbench.speculative.placement.trained_exit import find_exit

SHIPPED = sorted(p for p in (data_dir() / "heads").glob("*/*.safetensors") if p.stem != "lede")  # no head


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """No head that was trained on this machine is found first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


KINDS = ("medusa", "eagle", "eagle3", "fasteagle", "draft")
# Drafts that are drawn keep the law of the output, not its noise.
LIKELIEST = {
    "eagle3": "eagle3:draws=false",
    "fasteagle": "fasteagle:draws=false",
    "draft": "draft_model:source=trained,draws=false",
}
DRAWN = {"eagle3": "eagle3", "fasteagle": "fasteagle", "draft": "draft_model:source=trained"}


@pytest.mark.parametrize("kind", KINDS)
def test_there_is_one_for_the_model_that_ships(kind):
    assert data_dir() / "heads" / "tiny" / f"{kind}.safetensors" in SHIPPED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_head_is_small_and_says_what_it_is(path):
    head = read_head(path)
    assert path.stat().st_size < 25_000_000
    assert (head.kind, head.facts["target"]) == (path.stem, path.parent.name)
    assert set(head.facts) >= {"recipe", "trained", "held_out", "curve"}
    head.tensors()
    if head.kind == "exit_adapter":  # it drafts nothing: it foresees what the model will say
        held = head.facts["held_out"]
        assert path.stat().st_size < 1_000_000
        assert held["adapter"]["top8"] > held["lens"]["top8"] and held["adapter"]["kl"] < held["lens"]["kl"]
        assert find_exit(path.parent.name, head.fingerprint, 1 + head.facts["layer"]) is not None
        return
    assert {"medusa": "paths", "draft": "begun"}.get(head.kind, "features") in head.facts
    assert head.facts["recipe"]["schedule"]["seed"] >= 0
    runs = (
        {"chain", "chain, temperature 1"}
        if head.kind == "draft"
        else {"chain", "tree", "tree, temperature 1"}
    )
    assert set(head.facts["engine"]) >= runs
    assert all(run["tau"] >= 1 for run in head.facts["engine"].values())


@pytest.fixture(scope="module")
def session(cache):
    with Session("tiny", dtype="float64", numerics="pinned") as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts():
    lines = (data_dir() / "prompts" / "chat.jsonl").read_text().splitlines()[:6]
    return [json.loads(line)["messages"] for line in lines]


@pytest.fixture(scope="module")
def plain(session, prompts):
    """What the model says alone, by how it is asked."""

    @cache_of_results
    def said(**sampling):
        session.apply(Recipe.of("paged")).result()
        return [session.generate(p, max_tokens=40, **sampling).token_ids for p in prompts]

    return said


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_tiny_drafts_right_and_wrong_and_says_the_same(kind, sampling, session, prompts, plain):
    source = open_source("tiny")
    assert find_head("tiny", kind, source.fingerprint).path.is_relative_to(data_dir())
    expected = plain(**sampling)
    session.apply(Recipe.of("paged", LIKELIEST.get(kind, kind))).result()
    runs = [session.generate(p, max_tokens=40, **sampling) for p in prompts]
    assert [r.token_ids for r in runs] == expected
    if sampling and kind in DRAWN:  # how often one is right is told of drafts as they are by default
        session.apply(Recipe.of("paged", DRAWN[kind])).result()
        runs = [session.generate(p, max_tokens=40, **sampling) for p in prompts]
    rounds = [r.acceptance for r in runs]
    steps = sum(a["steps"] for a in rounds)
    accepting = sum(a["survivors"][0] for a in rounds if a["survivors"])
    # A path that ended before the draft did: of a tree some nodes are always refused.
    whole = sum(counts[int(depth)] for a in rounds for depth, counts in a["histogram"].items())
    assert accepting / steps >= 0.2
    assert (steps - whole) / steps >= 0.2
