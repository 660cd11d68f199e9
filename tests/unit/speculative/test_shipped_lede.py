"""What ships for LEDE: for the weights that ship, small, and never much worse than the best fixed choice."""

from __future__ import annotations

import pytest

from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.models.datadir import data_dir
from workbench.models.heads import read_head
from workbench.models.registry import open_source
from workbench.spec.recipe import Recipe
from workbench.speculative.lede.learnt import KINDS, find
from workbench.speculative.lede.q_learning import greedy
from workbench.speculative.lede.rounds import rate, static
from workbench.speculative.lede.state import Limits
from workbench.training.heads.target import open_target
from workbench.training.lede.collect import collect, costs_of, prompts_of
from workbench.training.lede.fit import rounds_of

SHIPPED = sorted((data_dir() / "heads").glob("*/lede.safetensors"))
each = pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.parent.name)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Nothing that was learnt on this machine is found first."""
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))


def test_there_is_one_for_a_model_that_was_trained_for_it_and_for_one_that_was_not():
    assert {"tiny", "tiny-exit"} <= {p.parent.name for p in SHIPPED}
    used = {p.parent.name: read_head(p).facts["held_out"]["greedy"]["used"] for p in SHIPPED}
    assert used["tiny"] == {"rate": 1.0}  # its early layers are no use: nothing is drafted
    assert used["tiny-exit"]["rate"] > 1.1


@each
def test_it_is_small_and_for_the_models_own_weights(path):
    model, file = path.parent.name, read_head(path)
    assert path.stat().st_size < 50_000 and file.kind == "lede"
    source = open_source(model)
    learnt = find(model, source.fingerprint, source.config.num_layers)
    assert set(learnt.ways) == set(KINDS)
    assert all(0 < way.limits.longest <= 12 for way in learnt.ways.values())


@each
def test_what_is_used_is_never_much_worse_than_the_best_fixed_choice(path):
    """On rounds of prompts that it neither learnt from nor was chosen by."""
    judged = read_head(path).facts["held_out"]
    assert set(judged) == {"greedy", "sampled"}
    for held in judged.values():
        assert held["texts"] >= 6
        assert held["used"]["rate"] >= 0.95 * held["fixed"]["rate"]
        assert held["used"]["rate"] >= 0.95  # of plain decoding


def test_on_text_that_is_logged_now_it_is_not_far_below_the_best_fixed_choice():
    """Fresh prompts, rounds in a walk: not far below the best fixed choice, nor below no drafts."""
    target = open_target("tiny-exit", dtype="float32")
    learnt = find("tiny-exit", target.source.fingerprint, 6)
    way, config = learnt.ways["greedy"], target.source.config
    prompts = prompts_of(target, "stdlib/", 8, 64, seed=11)
    texts = collect(target, prompts, Limits(6, way.limits.longest), 24, SamplingParams())
    costs = costs_of(config, way.values.operations)
    exit, drafts = way.fixed
    own = rate(rounds_of(texts, greedy(way.values, way.limits), way.limits, costs))
    fixed = rate(rounds_of(texts, static(exit, drafts), Limits(6, way.limits.longest, (exit,)), costs))
    assert own >= 0.95 * fixed
    assert own >= 0.95  # of plain decoding


@each
def test_output_is_the_models_whoever_chooses(path):
    prompts = ["def area(self):\n    return ", "import os\n\n\nclass Path:"]
    with Session(path.parent.name, dtype="float64", numerics="pinned") as session:
        for sampling in ({}, {"temperature": 0.8, "seed": 3}):
            session.apply(Recipe.of("paged")).result()
            plain = [session.generate(x, max_tokens=24, **sampling).token_ids for x in prompts]
            for policy in ("auto", "learnt", "fixed", "off"):
                session.apply(Recipe.of("paged", "layerskip:draws=false", f"lede:policy={policy}")).result()
                runs = [session.generate(x, max_tokens=24, **sampling) for x in prompts]
                assert [r.token_ids for r in runs] == plain
                drafts = [d for r in runs for s in r.steps for d in s["drafts"]]
                assert all(d["exit"] for d in drafts)
                assert drafts or policy != "learnt"
                assert not drafts or policy != "off"
