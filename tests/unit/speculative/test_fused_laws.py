"""Vectorised laws and rules against those of the ragged path: with the same noise the very same outcome.

That the ragged rules leave the law of the output unchanged is proven elsewhere, branch by branch; here every
row of a batch, at every temperature and filter, comes out as they do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftTree
from workbench.engine.noise import Stream, uniforms
from workbench.engine.params import SamplingParams
from workbench.engine.processing import law
from workbench.engine.sampling import PositionNoise
from workbench.speculative import rules
from workbench.speculative.fused.accept import SENTINEL, match, padded, reject
from workbench.speculative.fused.laws import Settings, TopLaw, at_ids, chance, draw, top_law

VOCAB, LENGTH, TOP = 40, 4, 12
PARAMS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, seed=s)
    for s, (t, k, p, m) in enumerate(
        [
            (1.0, 12, 1.0, 0.0),
            (0.7, 5, 1.0, 0.0),
            (1.3, 12, 0.8, 0.0),
            (1.0, 9, 0.95, 0.2),
            (0.0, 0, 1.0, 0.0),
            (2.0, 1, 1.0, 0.0),
            (5.0, 12, 0.01, 0.0),
            (1e-3, 12, 0.9, 0.0),
        ]
    )
]


def settings() -> Settings:
    rows = [(p.temperature, p.top_k, p.top_p, p.min_p) for p in PARAMS]
    return Settings(*torch.tensor(rows, dtype=torch.float64).T[:, :, None, None])


def logits(seed: int, rows: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(len(PARAMS), rows, VOCAB, generator=gen, dtype=torch.float64)


def noise(start: int, rows: int, stream: Stream = Stream.TOKEN) -> Tensor:
    keys = [[PositionNoise(p.seed, 0, start).key(j, stream) for j in range(rows)] for p in PARAMS]
    return torch.stack([torch.stack([torch.from_numpy(uniforms(k, VOCAB)) for k in row]) for row in keys])


def dense(made: TopLaw) -> Tensor:
    everything = torch.arange(VOCAB).expand(*made.p.shape[:2], VOCAB)
    return at_ids(made, everything, VOCAB)


def test_laws_are_those_of_every_request():
    x = logits(1, 3)
    made = dense(top_law(x, settings(), TOP))
    for i, params in enumerate(PARAMS):
        torch.testing.assert_close(made[i], law(x[i], params), rtol=1e-12, atol=1e-15)
    # Whole laws, where all tokens are kept.
    wide = SamplingParams(temperature=0.9, top_p=0.97)
    whole = Settings(*(torch.full((len(PARAMS), 1, 1), v, dtype=torch.float64) for v in (0.9, 0, 0.97, 0.0)))
    made = dense(top_law(x, whole, VOCAB))
    torch.testing.assert_close(made[0], law(x[0], wide), rtol=1e-12, atol=1e-15)


def test_the_likeliest_of_equal_tokens_is_the_lowest():
    x = torch.zeros(len(PARAMS), 1, VOCAB, dtype=torch.float64)
    x[:, :, [7, 3, 30]] = 1.0
    made = top_law(x, settings(), TOP)
    assert int(made.ids[4, 0, 0]) == 3 and float(made.p[4, 0, 0]) == 1.0


def test_verdicts_are_those_of_the_rules():
    """R2 on sampled drafts, R3 on others, greedy rows among them, with room for 0 to all drafts."""
    kept = set()
    for seed in range(40):
        start = 10 + seed
        near = logits(seed, LENGTH + 1)
        far = near[:, :LENGTH] + 0.7 * logits(100 + seed, LENGTH)
        p, q = top_law(near, settings(), TOP), top_law(far, settings(), TOP)
        drafts = draw(q, noise(start, LENGTH, Stream.DRAFT))
        room = torch.tensor([(seed + i) % (LENGTH + 1) for i in range(len(PARAMS))])
        coins = torch.stack([u[:, 0] for u in noise(start, LENGTH, Stream.COIN)])
        token = noise(start, LENGTH + 1)
        sampled = reject(drafts, p, q, room, coins, token, VOCAB)
        matched = match(drafts, draw(p, token), room, chance(TopLaw(p.ids[:, :-1], p.p[:, :-1]), drafts))
        for i, params in enumerate(PARAMS):
            n = int(room[i])
            own, laws = law(near[i], params)[: n + 1], law(far[i], params)[:n]
            at = PositionNoise(params.seed, 0, start)
            tree = DraftTree.chain(drafts[i, :n].tolist(), "toy", laws)
            plain = DraftTree.chain(drafts[i, :n].tolist(), "toy")
            for got, wanted in (
                (sampled, rules.rejection(tree, own, at.token, at.coin)),
                (matched, rules.match(plain, own, at.token)),
            ):
                assert int(got.accepted[i]) == len(wanted.path)
                assert int(got.own[i]) == wanted.token
                expected = got.expected[i, : min(len(wanted.path) + 1, n)]
                torch.testing.assert_close(
                    expected, torch.tensor(wanted.expected, dtype=torch.float64), rtol=1e-9, atol=1e-12
                )
                kept.add((len(wanted.path), n))
            said = padded(drafts, sampled)[i].tolist()
            count = int(sampled.accepted[i])
            assert said[:count] == drafts[i, :count].tolist() and said[count] == int(sampled.own[i])
            assert set(said[count + 1 :]) <= {SENTINEL}
    assert {(0, LENGTH), (LENGTH, LENGTH), (0, 0), (2, LENGTH)} <= kept
