"""G3 on the shipped model: temperature and filters on real logits, drafts from a law beside the model's own.

Two thousand seeded rounds give the law of the first token and of the second given the first; both are
compared with the model's processed logits, recorded from plain steps.
"""

from functools import cache

import pytest
import torch

from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv
from workbench.core.build_weights import build_weights
from workbench.core.plan import ModelFacts, plan, require
from workbench.engine.draft_seams import DraftTree
from workbench.engine.params import SamplingParams
from workbench.engine.processing import process
from workbench.engine.sampling import PositionNoise
from workbench.models.decoder import Decoder
from workbench.models.registry import open_source
from workbench.spec.errors import ModelNotFound
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe
from workbench.speculative.verify import ExactVerify

ALPHA = 1e-6
ROUNDS = 2000
PROMPT = (100, 200, 300)
SETTINGS = {"top_p": {"temperature": 0.7, "top_p": 0.9}, "top_k": {"temperature": 1.0, "top_k": 20}}


@cache
def logits_after(lab, ids):
    """The shipped model's logits [V] after ``ids``, float32."""
    source = open_source("tiny")
    limits = EngineLimits(256, 0, 1, 128)
    made = require(
        plan(Recipe(), ModelFacts("tiny", source.config), dtype="float32", numerics="pinned", limits=limits)
    )
    rows = []
    with torch.inference_mode():
        decoder = Decoder(source.config, build_weights(made, source))
        engine = build_engine(made, decoder, build_kv(made, decoder), None, ())
        lab.record_logits(engine, rows)
        lab.run_engine(engine, [ids], max_tokens=1)
    return rows[-1][2].clone()


def counted(tokens, law, n=15):
    """Counts and law of the ``n`` likeliest tokens, each its own bucket, and the rest."""
    of = torch.full((len(law),), n)
    of[law.topk(n).indices] = torch.arange(n)
    want = torch.zeros(n + 1, dtype=torch.float64).index_add(0, of, law.double())
    return torch.bincount(of[torch.tensor(tokens)], minlength=n + 1), want


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rule", ["r2", "r4", "r5", "wrong"])
def test_two_tokens_follow_the_models_own_law(lab, toy, wrong, setting, rule):
    try:
        open_source("tiny")
    except ModelNotFound as err:
        pytest.skip(str(err))
    params = SamplingParams(**SETTINGS[setting])
    root = logits_after(lab, PROMPT)
    first = process(root[None], params)[0]
    best = int(first.argmax())
    second = process(logits_after(lab, (*PROMPT, best))[None], params)[0]
    other = torch.randn(root.shape, generator=torch.Generator().manual_seed(1))
    q = process((root + 0.6 * other)[None], params)[0]
    judge = wrong.resample_from_p if rule == "wrong" else ExactVerify(rule).sampled
    firsts, seconds, accepted = [], [], 0
    for seed in range(ROUNDS):
        noise = PositionNoise(seed, 0, len(PROMPT))
        tree = DraftTree.chain([noise.draft(q, 0)], "toy", q[None])
        verdict = judge(tree, torch.stack([first, second]), noise.token, noise.coin)
        accepted += bool(verdict.path)
        firsts.append(tree.tokens[0] if verdict.path else verdict.token)
        if verdict.path and firsts[-1] == best:
            seconds.append(verdict.token)
    assert 0.05 * ROUNDS < accepted < 0.98 * ROUNDS and len(seconds) > 30
    fits = [toy.goodness(*counted(firsts, first)), toy.goodness(*counted(seconds, second))]
    if rule == "wrong":
        assert fits[0] < ALPHA
    else:
        assert min(fits) > ALPHA
