"""Verification against the torch rules on the same noise, for chains and trees; the law it leaves;
refusals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.engine.processing import best as engine_best
from workbench.engine.sampling import PositionNoise
from workbench.kernels.decode.sample import Noise, best
from workbench.kernels.decode.spec_verify import (
    reference,
    verify_greedy,
    verify_match,
    verify_rejection,
)
from workbench.kernels.layouts.verdict import Verdicts, drafts
from workbench.spec.errors import InvariantError, UnsupportedInput
from workbench.speculative import rules

pytestmark = pytest.mark.usefixtures("poisoned")

V = 40
SHAPES: list[tuple[int, ...]] = [
    (-1, 0, 1, 2),  # a chain
    (),  # no draft
    (-1, -1, -1, 0, 0, 2, 3, 3, 7),  # siblings on several levels
    (-1,),
    (-1, 0, 0, 0, 1, 1, 4),
    (-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16),  # more than 16 nodes
]


def peaked(n: int, generator: torch.Generator, width: int = V) -> Tensor:
    """Laws with a few likely tokens and some impossible ones, so that drafts are often right."""
    p = (torch.randn(n, width, generator=generator) * 2.5).softmax(-1)
    p[torch.rand(n, width, generator=generator) < 0.2] = 0
    p[:, 0] += 1e-3
    return p / p.sum(-1, keepdim=True)


def trees(
    p: Tensor, generator: torch.Generator, *, repeat: bool = False
) -> list[tuple[list[int], list[int]]]:
    """Drafted tokens for SHAPES: likely under the parent's own law, siblings distinct unless ``repeat``."""
    out, row = [], 0
    for shape in SHAPES:
        tokens: list[int] = []
        for i, parent in enumerate(shape):
            order = p[row + 1 + parent].topk(6).indices.tolist()
            used = [] if repeat else [tokens[j] for j in range(i) if shape[j] == parent]
            choices = [t for t in order if t not in used]
            tokens.append(choices[int(torch.randint(min(3, len(choices)), (), generator=generator))])
        out.append((tokens, list(shape)))
        row += len(shape) + 1
    return out


def settings(generator: torch.Generator, n: int, device: str) -> tuple[Noise, list[PositionNoise]]:
    seeds = torch.randint(0, 2**62, (n,), generator=generator).tolist()
    theirs = [PositionNoise(seed, i % 2, 100 + 7 * i) for i, seed in enumerate(seeds)]
    mine = Noise.rows(seeds, [t.index for t in theirs], [t.start for t in theirs], device)
    return mine, theirs


def same(found: Verdicts, expected: Sequence[Verdict], tolerance: float = 1e-6) -> None:
    for mine, theirs in zip(found.lists(), expected, strict=True):
        assert mine[:3] == (theirs.path, theirs.token, theirs.corrected)
        np.testing.assert_allclose(mine[3], theirs.expected, atol=tolerance)


def split(p: Tensor) -> list[Tensor]:
    return list(p.split([len(s) + 1 for s in SHAPES]))


def test_r1_keeps_what_the_model_would_choose(generator: torch.Generator, device: str) -> None:
    scores = torch.randn(sum(len(s) + 1 for s in SHAPES), V, generator=generator).round(decimals=1)
    made = trees(scores.softmax(-1), generator)
    found = verify_greedy(drafts(made).to(device), scores.to(device))
    expected = [
        rules.greedy(DraftTree(tuple(t), tuple(s), "test"), engine_best(x))
        for (t, s), x in zip(made, split(scores), strict=True)
    ]
    same(found, expected)


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("round_", range(2))
def test_r3_and_r4_draw_what_a_plain_run_draws(
    repeat: bool, round_: int, generator: torch.Generator, device: str
) -> None:
    p = peaked(sum(len(s) + 1 for s in SHAPES), generator)
    made = trees(p, generator, repeat=repeat)
    mine, theirs = settings(generator, len(SHAPES), device)
    found = verify_match(drafts(made).to(device), p.to(device), mine)
    expected = [
        rules.match(DraftTree(tuple(t), tuple(s), "test"), x, noise.token)
        for (t, s), x, noise in zip(made, split(p), theirs, strict=True)
    ]
    same(found, expected)


@pytest.mark.parametrize("width", [V, 30])
@pytest.mark.parametrize("round_", range(2))
def test_r2_is_the_torch_rule_on_the_same_noise(
    width: int, round_: int, generator: torch.Generator, device: str
) -> None:
    p = peaked(sum(len(s) + 1 for s in SHAPES), generator)
    q = 0.6 * peaked(sum(map(len, SHAPES)), generator, width) + 0.4 / width
    made, node = [], 0
    for shape in SHAPES:
        tokens = [int(torch.multinomial(q[node + i], 1, generator=generator)) for i in range(len(shape))]
        made.append((tokens, list(shape)))
        node += len(shape)
    mine, theirs = settings(generator, len(SHAPES), device)
    found = verify_rejection(drafts(made).to(device), p.to(device), q.to(device), mine)
    expected, node = [], 0
    for (tokens, shape), x, noise in zip(made, split(p), theirs, strict=True):
        tree = DraftTree(tuple(tokens), tuple(shape), "test", q[node : node + len(shape)])
        expected.append(rules.rejection(tree, x, noise.token, noise.coin))
        node += len(shape)
    same(found, expected)


def test_r2_with_q_equal_to_p_keeps_everything(generator: torch.Generator, device: str) -> None:
    p = peaked(5, generator)
    tokens = [int(torch.multinomial(p[i], 1, generator=generator)) for i in range(4)]
    mine, _ = settings(generator, 1, device)
    made = drafts([(tokens, [-1, 0, 1, 2])]).to(device)
    ((path, _, corrected, chances),) = verify_rejection(
        made, p.to(device), p[:4].contiguous().to(device), mine
    ).lists()
    assert path == (0, 1, 2, 3)
    assert not corrected
    np.testing.assert_allclose(chances, 1.0, atol=1e-6)


def test_the_definition_walks_like_the_rules(generator: torch.Generator) -> None:
    p, q = peaked(8, generator), 0.5 * peaked(7, generator) + 0.5 / V
    shape = list(SHAPES[4])
    tokens = [int(torch.multinomial(q[i], 1, generator=generator)) for i in range(7)]
    noise = PositionNoise(5, 0, 9)
    coins = [[noise.coin(d, i) for i in range(7)] for d in range(8)]
    path, _ = reference(tokens, shape, p, coins, q)
    tree = DraftTree(tuple(tokens), tuple(shape), "test", q)
    assert tuple(path) == rules.rejection(tree, p, noise.token, noise.coin).path


def test_the_output_follows_the_target_and_a_wrong_q_does_not(device: str) -> None:
    """G1, G2: the first token of 120 rounds with a sampled draft, chi-square at 0.1 %."""
    n, target = 120, torch.tensor([0.7, 0.2, 0.08, 0.02])
    drafter = torch.tensor([0.05, 0.15, 0.3, 0.5])
    drawn = torch.multinomial(
        drafter, n, replacement=True, generator=torch.Generator().manual_seed(11)
    ).tolist()
    made = drafts([([x], [-1]) for x in drawn]).to(device)
    mine = Noise.rows([8] * n, [0] * n, list(range(0, 9 * n, 9)), device)
    p = target.expand(2 * n, -1).contiguous().to(device)

    def first(q: Tensor) -> np.ndarray:
        done = verify_rejection(made, p, q.expand(n, -1).contiguous().to(device), mine).lists()
        tokens = [x if path else token for x, (path, token, _, _) in zip(drawn, done, strict=True)]
        return np.bincount(tokens, minlength=4)

    assert chisquare(first(drafter), n * target.numpy()).pvalue > 1e-3
    assert chisquare(first(drafter.flip(0)), n * target.numpy()).pvalue < 1e-6


def test_a_token_its_law_cannot_have_drawn_is_an_error(generator: torch.Generator, device: str) -> None:
    p, q = peaked(2, generator), torch.zeros(1, V)
    q[0, 1] = 1.0
    mine, _ = settings(generator, 1, device)
    with pytest.raises(InvariantError, match="Node 0 of sequence 0"):
        verify_rejection(drafts([([2], [-1])]).to(device), p.to(device), q.to(device), mine)


def test_misfits_are_refused(generator: torch.Generator, device: str) -> None:
    p = peaked(3, generator).to(device)
    made = drafts([([1, 2], [-1, 0])]).to(device)
    mine, _ = settings(generator, 1, device)
    for bad in (
        lambda: verify_match(made, p[:2], mine),
        lambda: verify_match(made, p.half(), mine),
        lambda: verify_match(made, p, Noise.rows([1, 2], [0, 0], [0, 0], device)),
        lambda: verify_rejection(made, p, p, mine),
        lambda: verify_rejection(made, p[:, :30].contiguous(), p[:2], mine),
        lambda: verify_greedy(drafts([(list(range(200)), list(range(-1, 199)))]).to(device), p.repeat(67, 1)),
        lambda: drafts([([1], [0])]),
    ):
        with pytest.raises(UnsupportedInput):
            bad()
    assert verify_match(drafts([]).to(device), p[:0], Noise.rows([], [], [], device)).lists() == []


def test_the_highest_score_with_the_lowest_id_wins(generator: torch.Generator, device: str) -> None:
    scores = torch.randn(5, 9000, generator=generator).bfloat16()
    scores[0, [77, 5000]] = 50.0
    scores[1] = -3.0
    assert best(scores.to(device)).tolist() == engine_best(scores.float())
