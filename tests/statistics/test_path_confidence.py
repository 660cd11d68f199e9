"""What EAGLE gives the paths of its trees is about what is accepted of them, and growing by it pays.

Li et al., *EAGLE-2* (arXiv 2406.16858, sections 3.2 and 4.1): the head's confidence stands for the chance of
acceptance, so that the nodes to verify can be chosen by the product of it along their paths.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.models.datadir import data_dir
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.models.tokenizer import load_tokenizer
from workbench.spec.events import DraftRecord
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe
from workbench.speculative.paths import foreseen, reliability
from workbench.speculative.stats import acceptance

pytestmark = pytest.mark.slow
STATIC = "eagle:tree=static,draws=false"  # 25 nodes, 5 deep
DYNAMIC = "eagle:tree=dynamic,depth=5,width=8,nodes=25"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """No head that was trained on this machine is found first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def drafts(cache):
    """Runs the shipped head of ``tiny`` on unseen text."""
    source, tokenizer = open_source("tiny"), load_tokenizer("tiny")
    facts = ModelFacts("tiny", source.config, source.fingerprint)
    with torch.inference_mode():
        weights = build_weights(require(plan(Recipe(), facts, dtype="float32", numerics="fast")), source)
        decoder = Decoder(source.config, weights)
    ids = tokenizer.encode((data_dir() / "text" / "eval.txt").read_text()[:40_000])
    prompts = [tuple(ids[i * 400 : i * 400 + 48]) for i in range(12)]

    def run(use: str, tokens: int, **sampling: float) -> list[DraftRecord]:
        limits = EngineLimits(16 * 256, 0, 16, 224)
        made = require(plan(Recipe.of("paged", use), facts, dtype="float32", numerics="fast", limits=limits))
        out: list[DraftRecord] = []
        with torch.inference_mode():
            engine = build_engine(made, decoder, build_kv(made, decoder), None, ())
            for i, prompt in enumerate(prompts):
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, **sampling)
                engine.add(Request(f"r{i}", prompt, params))
            while engine.has_work:
                out += engine.step()[0].drafts
        return out

    return run


@pytest.fixture(scope="module")
def sampled(drafts):
    """Rounds at temperature 1 of trees of likeliest tokens, which R3 judges: of several seeds, since the mean
    length of one alone is off by a tenth."""
    return {
        use: [r for seed in (1, 2, 3, 4) for r in drafts(use, 64, temperature=1.0, seed=seed)]
        for use in (STATIC, DYNAMIC)
    }


@pytest.mark.parametrize("use", [STATIC, DYNAMIC])
def test_accepted_lengths_are_foreseen_within_15_percent(sampled, use):
    """A node is accepted by the target's chance of it, so that the head's, added up, are the length."""
    records = sampled[use]
    assert len(records) > 1500 and all(len(r.chances) == len(r.tokens) and r.rule == "r3" for r in records)
    measured = sum(len(r.accepted) for r in records)
    assert sum(map(foreseen, records)) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("use", [STATIC, DYNAMIC])
def test_what_is_accepted_is_what_the_paths_promise_in_every_bin(sampled, use):
    """Reliability: near the promise, as far as so few nodes can tell; a head that is too sure is not."""
    bins = [b for b in reliability(sampled[use]) if b.nodes >= 20]
    assert len(bins) >= 6 and bins[0].foreseen < 0.02 and bins[-1].foreseen > 0.4
    assert all(abs(b.share - b.foreseen) < _room(b) for b in bins)
    sure = reliability(replace(r, chances=tuple(c**0.5 for c in r.chances)) for r in sampled[use])
    assert sum(abs(b.share - b.foreseen) > _room(b) for b in sure if b.nodes >= 20) >= 3


def _room(b):
    """A twentieth, and four standard errors of a share of so many."""
    return 0.05 + 4 * (b.foreseen * (1 - b.foreseen) / b.nodes) ** 0.5


def test_a_tree_grown_by_confidence_keeps_at_least_what_a_static_one_of_as_many_nodes_does(drafts):
    static, dynamic = drafts(STATIC, 32), drafts(DYNAMIC, 32)
    assert max(len(r.tokens) for r in static) == max(len(r.tokens) for r in dynamic) == 25
    assert acceptance(dynamic).tau >= acceptance(static).tau > 1
