"""The rules driven by the engine's own noise: chi-square goodness of fit, fixed seeds, alpha 1e-6.

Independence between seeds, positions and streams is part of what is tested, over several rounds. Negative
controls must be rejected at the level at which the right rules pass.
"""

import pytest
import torch

from workbench.engine.draft_seams import DraftTree
from workbench.engine.noise import Key, Stream, sample, uniforms
from workbench.engine.sampling import PositionNoise
from workbench.speculative import rules
from workbench.speculative.block import block
from workbench.speculative.recursive import conditional_laws, recursive
from workbench.speculative.verify import ExactVerify

ALPHA = 1e-6
ROUNDS = 10_000


def match(tree, p, sample, coin):
    return rules.match(tree, p, sample)


def first_tokens(rule, target, tree_of, rounds=ROUNDS):
    """Counts [V] of the first emitted token, and the share of accepted first drafts."""
    counts = torch.zeros(len(target), dtype=torch.long)
    accepted = 0
    for seed in range(rounds):
        noise = PositionNoise(seed, 0, 7)
        tree = tree_of(noise)
        p = target[[0, *tree.tokens]]
        verdict = rule(tree, p, noise.token, noise.coin)
        counts[tree.tokens[verdict.path[0]] if verdict.path else verdict.token] += 1
        accepted += bool(verdict.path)
    return counts, accepted / rounds


def chain_of(draft, k):
    """A drafter that samples with the draft stream."""

    def make(noise):
        tokens, last = [], 0
        for depth in range(k):
            last = noise.draft(draft[last], depth)
            tokens.append(last)
        return DraftTree.chain(tokens, "toy", draft[[0, *tokens[:-1]]])

    return make


@pytest.mark.parametrize("vocab", [16, 64])
@pytest.mark.parametrize("rule", [rules.rejection, match, block], ids=["r2", "r4", "r5"])
def test_first_token_of_sampled_drafts(toy, rule, vocab):
    target, draft = toy.models(vocab, vocab)
    counts, accepted = first_tokens(rule, target, chain_of(draft, 1))
    assert toy.goodness(counts, target[0]) > ALPHA
    assert float((counts / ROUNDS - target[0]).abs().sum()) / 2 < 0.6 * (vocab / ROUNDS) ** 0.5
    alpha = torch.minimum(target[0], draft[0]).sum() if rule is not match else target[0] @ draft[0]
    assert abs(accepted - float(alpha)) < 5 * 0.5 / ROUNDS**0.5


def test_first_token_of_siblings_without_replacement(toy):
    target, draft = toy.models(16, 16)

    def siblings(noise):
        a = noise.draft(draft[0], 0)
        b = noise.draft(draft[0].index_fill(0, torch.tensor([a]), 0), 100)
        return DraftTree((a, b), (-1, -1), "toy", conditional_laws(draft[0], (a, b)))

    counts, accepted = first_tokens(recursive, target, siblings)
    assert toy.goodness(counts, target[0]) > ALPHA
    assert accepted > float(torch.minimum(target[0], draft[0]).sum()) + 0.03


def test_coupled_drafts_are_accepted_as_often_as_promised_and_change_nothing(toy):
    """R4 with a drafter on the target's own noise: the plain run's tokens, (1 - TV) / (1 + TV) of drafts."""
    target, draft = toy.models(16, 16)
    counts, accepted = first_tokens(
        match, target, lambda noise: DraftTree.chain([noise.token(draft[0], 0)], "toy", draft[:1])
    )
    plain = torch.bincount(
        torch.tensor([PositionNoise(s, 0, 7).token(target[0], 0) for s in range(ROUNDS)]), minlength=16
    )
    assert torch.equal(counts, plain)
    tv = float((target[0] - draft[0]).abs().sum()) / 2
    assert accepted > (1 - tv) / (1 + tv) - 5 * 0.5 / ROUNDS**0.5
    assert accepted > float(target[0] @ draft[0]) + 0.2


def test_first_token_of_a_deterministic_tree(toy):
    target, _ = toy.models(32, 1)
    tree = DraftTree((3, 4, 5, 6), (-1, -1, -1, 0), "toy")
    counts, accepted = first_tokens(match, target, lambda noise: tree)
    assert toy.goodness(counts, target[0]) > ALPHA
    assert abs(accepted - float(target[0, 3:6].sum())) < 5 * 0.5 / ROUNDS**0.5


@pytest.mark.parametrize("name", ["resample_from_p", "one_hot_residual"])
def test_wrong_rules_are_rejected(toy, wrong, name):
    target, draft = toy.models(16, 16)
    counts, _ = first_tokens(getattr(wrong, name), target, chain_of(draft, 1))
    assert toy.goodness(counts, target[0]) < ALPHA


def test_bonus_from_the_drafter_is_rejected(toy, wrong):
    """Seen in the pair of the first two tokens; a round that gave one token is continued plainly."""
    target, draft = toy.models(16, 16)
    results = []
    for rule in (rules.rejection, wrong.bonus_from_q):
        counts = torch.zeros(16, 16, dtype=torch.long)
        for seed in range(ROUNDS):
            noise = PositionNoise(seed, 0, 7)
            tree = chain_of(draft, 1)(noise)
            verdict = rule(tree, target[[0, *tree.tokens]], noise.token, noise.coin)
            out = [*(tree.tokens[i] for i in verdict.path), verdict.token]
            counts[out[0], out[1] if len(out) > 1 else noise.token(target[out[0]], 1)] += 1
        results.append(toy.goodness(counts, target[0][:, None] * target))
    assert results[0] > ALPHA > results[1]


def test_drafting_with_the_targets_noise_is_rejected(toy):
    """Why drafters have a stream of their own."""
    target, draft = toy.models(16, 16)

    def shared(noise):
        return DraftTree.chain([noise.token(draft[0], 0)], "toy", draft[:1])

    def separate(noise):
        return chain_of(draft, 1)(noise)

    counts, _ = first_tokens(rules.rejection, target, shared)
    assert toy.goodness(counts, target[0]) < ALPHA
    counts, _ = first_tokens(rules.rejection, target, separate)
    assert toy.goodness(counts, target[0]) > ALPHA


@pytest.mark.parametrize(
    ("kind", "rule"), [("sampled", "auto"), ("sampled", "r5"), ("sampled", "r4"), ("deterministic", "auto")]
)
def test_three_tokens_over_several_rounds(toy, kind, rule):
    """125 cells of a 5-symbol Markov chain, drafted two at a time."""
    target, draft = toy.models(5, 2)
    draft = (draft + 0.1) / (draft + 0.1).sum(-1, keepdim=True)
    verify = ExactVerify(rule)
    counts = torch.zeros(5, 5, 5, dtype=torch.long)
    for seed in range(ROUNDS):
        out = [0]
        while len(out) < 4:
            noise = PositionNoise(seed, 1, len(out))
            tokens, last = [], out[-1]
            for depth in range(2):
                last = noise.draft(draft[last], depth) if kind == "sampled" else int(draft[last].argmax())
                tokens.append(last)
            q = draft[[out[-1], tokens[0]]] if kind == "sampled" else None
            tree = DraftTree.chain(tokens, "toy", q)
            verdict = verify.sampled(tree, target[[out[-1], *tokens]], noise.token, noise.coin)
            out += [*(tokens[i] for i in verdict.path), verdict.token]
        counts[tuple(out[1:4])] += 1
    assert toy.goodness(counts, toy.future(target, 0, 3)) > ALPHA


class Reused(PositionNoise):
    """The noise of a position for drafts and coins too: what a round discarded is met again by the next."""

    def key(self, depth, stream):
        return Key(self.seed, self.index, self.start + depth, stream)


def test_a_block_judged_as_a_whole_needs_fresh_noise_in_the_next_round(toy):
    """R5 keeps nothing because of what later drafts were: with their noise again, what follows is biased."""
    (target, _), (_, draft) = toy.models(3, 1), toy.models(3, 7)
    fits = []
    for noise_of in (PositionNoise, Reused):
        counts = torch.zeros(3, 3, 3, dtype=torch.long)
        for seed in range(ROUNDS // 2):
            out = [0]
            while len(out) < 4:
                noise = noise_of(seed, 0, len(out))
                tokens = [out[-1]]
                for depth in range(3):
                    tokens.append(noise.draft(draft[tokens[-1]], depth))
                tree = DraftTree.chain(tokens[1:], "toy", draft[tokens[:-1]])
                verdict = block(tree, target[tokens], noise.token, noise.coin)
                out += [*(tree.tokens[i] for i in verdict.path), verdict.token]
            counts[tuple(out[1:4])] += 1
        fits.append(toy.goodness(counts, toy.future(target, 0, 3)))
    assert fits[0] > ALPHA > fits[1]


def test_gumbel_max_draws_from_the_law_at_every_kind_of_key(toy):
    target, _ = toy.models(64, 9)
    keys = {
        "seeds": [Key(i, 0, 5) for i in range(ROUNDS)],
        "samples": [Key(1, i, 5) for i in range(ROUNDS)],
        "positions": [Key(1, 0, i) for i in range(ROUNDS)],
    }
    for name, group in keys.items():
        counts = torch.bincount(torch.tensor([sample(target[0], k) for k in group]), minlength=64)
        assert toy.goodness(counts, target[0]) > ALPHA, name
        assert toy.goodness(counts, target[1]) < ALPHA, name


def test_neighbouring_positions_are_independent(toy):
    target, _ = toy.models(6, 4)
    counts = torch.zeros(6, 6, dtype=torch.long)
    for i in range(ROUNDS):
        counts[sample(target[0], Key(3, 0, i)), sample(target[0], Key(3, 0, i + 1))] += 1
    assert toy.goodness(counts, target[0][:, None] * target[0]) > ALPHA


def test_coins_are_uniform_and_unrelated_to_tokens(toy):
    coins = torch.tensor(
        [[uniforms(Key(i, 0, 3, s), 1)[0] for s in (Stream.COIN, Stream.TOKEN)] for i in range(ROUNDS)]
    )
    cells = (coins * 8).long()
    counts = torch.zeros(8, 8, dtype=torch.long)
    for a, b in cells.tolist():
        counts[a, b] += 1
    assert toy.goodness(counts, torch.full((8, 8), 1 / 64, dtype=torch.float64)) > ALPHA
