"""Exact rules leave the joint output law unchanged to 1e-12: integrated, not sampled.

Each test has its negative control: the same integration of a rule that is wrong must not come out right.
"""

import itertools
import random

import pytest
import torch

from workbench.engine.draft_seams import DraftTree
from workbench.spec.errors import InvariantError
from workbench.speculative import exact_law, imitations, rules, typical
from workbench.speculative.verify import ExactVerify

TOL = 1e-12


def r2(tree, p, sample, coin):
    return rules.rejection(tree, p, sample, coin)


def r3(tree, p, sample, coin):
    return rules.match(tree, p, sample)


distance = exact_law.distance


def random_tree(seed, vocab, depth):
    """Up to two children per node, siblings usually distinct; not a chain."""
    rng = random.Random(seed)
    tokens, parents, frontier = [], [], [-1]
    for _ in range(depth):
        below = []
        for node in frontier:
            for t in rng.choices(range(vocab), k=rng.choice((1, 2, 2))):
                below.append(len(tokens))
                tokens.append(t)
                parents.append(node)
        frontier = rng.sample(below, min(2, len(below)))
    return DraftTree(tuple(tokens), tuple(parents), "toy")


@pytest.mark.parametrize("rule", [r2, r3, ExactVerify().sampled], ids=["r2", "r4", "auto"])
@pytest.mark.parametrize(("vocab", "k"), [(2, 3), (3, 3), (4, 2), (6, 1), (6, 2)])
def test_sampled_chains_keep_the_joint_law(toy, rule, vocab, k):
    for seed in range(2):
        target, draft = toy.models(vocab, seed)
        law = toy.output_law(rule, target, toy.sampled_chains(draft, k), k + 1)
        assert float((law - toy.future(target, 0, k + 1)).abs().max()) < TOL


@pytest.mark.parametrize("seed", range(6))
def test_deterministic_trees_keep_the_joint_law(toy, wrong, seed):
    target, _ = toy.models(5, seed)
    tree = random_tree(seed, 5, 3)
    want = toy.future(target, 0, 4)
    for rule in (r3, wrong.textbook_r3, ExactVerify("r3").sampled):
        assert float((toy.output_law(rule, target, [(1.0, tree)], 4) - want).abs().max()) < TOL


@pytest.mark.parametrize("seed", range(6))
def test_matching_one_sample_is_the_textbook_rule(toy, wrong, seed):
    """R3 through the position's own sample has the same law of (path, token) as coins and renormalisation."""
    target, _ = toy.models(5, seed)
    tree = random_tree(100 + seed, 5, 3)
    laws = []
    for rule in (r3, wrong.textbook_r3):
        law = {}
        for verdict, weight in toy.integrate(rule, tree, toy.rows(target, tree)):
            key = (verdict.path, verdict.token, verdict.corrected)
            law[key] = law.get(key, 0.0) + weight
        laws.append(law)
    for key in laws[0].keys() | laws[1].keys():
        assert abs(laws[0].get(key, 0.0) - laws[1].get(key, 0.0)) < TOL


@pytest.mark.parametrize("replace", [True, False])
def test_sampled_siblings_keep_the_joint_law(toy, replace):
    """Two siblings drawn with or without replacement, each continued by one sampled token."""
    vocab = 4
    target, draft = toy.models(vocab, 3)
    target = (target + 0.05) / (target + 0.05).sum(-1, keepdim=True)

    def drafts():
        for a, b, c, d in itertools.product(range(vocab), repeat=4):
            qa = draft[0]
            qb = qa
            if not replace:
                qb = qa.index_fill(0, torch.tensor([a]), 0)
                qb = qb / qb.sum()
            q = torch.stack([qa, qb, draft[a], draft[b]])
            chance = float(qa[a] * qb[b] * draft[a, c] * draft[b, d])
            if chance > 0:
                yield chance, DraftTree((a, b, c, d), (-1, -1, 0, 1), "toy", q)

    law = toy.output_law(r2, target, drafts(), 3)
    assert float((law - toy.future(target, 0, 3)).abs().max()) < TOL


@pytest.mark.parametrize("name", ["resample_from_p", "bonus_from_q", "one_hot_residual"])
def test_wrong_chain_rules_are_caught(toy, wrong, name):
    target, draft = toy.models(4, 1)
    law = toy.output_law(getattr(wrong, name), target, toy.sampled_chains(draft, 2), 3)
    assert distance(law, toy.future(target, 0, 3)) > 1e-2


def test_wrong_ratios_are_caught(toy):
    """(c) drawn from the filtered q, judged by the raw one; (d) an argmax draft judged by its soft law."""
    target, draft = toy.models(4, 1)
    want = toy.future(target, 0, 2)
    raw = list(imitations.filtered_by_raw(draft, 1))
    assert distance(toy.output_law(r2, target, raw, 2), want) > 1e-2
    filtered = torch.zeros(4, dtype=torch.float64)
    for chance, tree in raw:
        filtered[tree.tokens[0]] = chance
    honest = [(c, DraftTree.chain(t.tokens, "toy", filtered[None])) for c, t in raw]
    assert distance(toy.output_law(r2, target, honest, 2), want) < TOL

    best = int(draft[0].argmax())
    soft = [(1.0, DraftTree.chain([best], "toy", draft[:1]))]
    assert distance(toy.output_law(r2, target, soft, 2), want) > 1e-2


def test_dropping_a_drawn_token_by_its_confidence_is_caught(toy):
    """Under R2; matching does not care how the candidates were chosen."""
    target, draft = toy.models(4, 1)
    want = toy.future(target, 0, 3)
    drafts = list(imitations.dropped_if_unsure(draft, 2))
    assert distance(toy.output_law(r2, target, drafts, 3), want) > 1e-2
    assert distance(toy.output_law(r3, target, drafts, 3), want) < TOL


def test_what_is_no_law_is_not_drawn_from(toy):
    target, draft = toy.models(4, 1)

    def halved(tree, p, sample, coin):
        return r2(tree, p / 2, sample, coin)

    with pytest.raises(InvariantError, match="adds up to"):
        toy.output_law(halved, target, toy.sampled_chains(draft, 1), 2)


def test_siblings_of_the_package_are_all_that_can_be_drawn(toy):
    target, draft = toy.models(5, 3)
    drafts = list(exact_law.sampled_siblings(draft, 3))
    assert sum(chance for chance, _ in drafts) == pytest.approx(1, abs=TOL)
    law = toy.output_law(ExactVerify("r6").sampled, target, drafts, 2)
    assert distance(law, toy.future(target, 0, 2)) < TOL
    (chain,) = exact_law.likeliest_chain(draft, 2)
    first = int(draft[0].argmax())
    assert chain[1].tokens == (first, int(draft[first].argmax())) and chain[1].q is None
    alpha = float(torch.minimum(target[0], draft[0]).sum())
    assert exact_law.mean_accepted(r2, target, exact_law.sampled_chains(draft, 1)) == pytest.approx(alpha)


def test_missing_renormalisation_between_siblings_is_caught(toy, wrong):
    target, _ = toy.models(5, 2)
    a, b = target[0].topk(2).indices.tolist()
    tree = DraftTree((a, b), (-1, -1), "toy")
    want = toy.future(target, 0, 2)
    assert distance(toy.output_law(wrong.no_renormalisation, target, [(1.0, tree)], 2), want) > 1e-2
    assert distance(toy.output_law(r3, target, [(1.0, tree)], 2), want) < TOL


@pytest.mark.parametrize("rule", [r2, r3], ids=["r2", "r4"])
def test_expected_acceptance_is_unbiased(toy, rule):
    """Σ expected and the accepted count have the same mean, and the former the smaller variance under R2."""
    target, draft = toy.models(4, 5)
    moments = torch.zeros(2, 2, dtype=torch.float64)
    for chance, tree in toy.sampled_chains(draft, 1):
        for verdict, weight in toy.integrate(rule, tree, toy.rows(target, tree)):
            x = torch.tensor([sum(verdict.expected), len(verdict.path)], dtype=torch.float64)
            moments += chance * weight * torch.stack([x, x * x])
    mean, square = moments
    assert abs(float(mean[0] - mean[1])) < TOL
    assert float(square[0]) < float(square[1])
    alpha = (
        float(torch.minimum(target[0], draft[0]).sum()) if rule is r2 else float((target[0] * draft[0]).sum())
    )
    assert abs(float(mean[1]) - alpha) < TOL


def test_a_perfect_drafter_is_always_accepted_and_an_adversary_never(toy):
    target, _ = toy.models(4, 0)
    for _, tree in toy.sampled_chains(target, 3):
        assert all(v.path == (0, 1, 2) for v, _ in toy.integrate(r2, tree, toy.rows(target, tree)))
    never = DraftTree.chain([0, 0], "toy")  # models() forbids token seed % vocab = 0
    outcomes = toy.integrate(r3, never, toy.rows(target, never))
    assert all(v.path == () and v.corrected for v, _ in outcomes)
    law = toy.output_law(r3, target, [(1.0, never)], 3)
    assert float((law - toy.future(target, 0, 3)).abs().max()) < TOL


def test_typical_acceptance_does_not_keep_the_law(toy):
    """The integrator finds a lossy rule lossy, also where the exact ones are exact to 1e-12."""
    target, draft = toy.models(4, 1)
    want = toy.future(target, 0, 3)
    checker = typical.bind(typical.Config())
    for drafts in (list(toy.sampled_chains(draft, 2)), [(1.0, DraftTree.chain([2, 2], "toy"))]):
        assert distance(toy.output_law(checker.sampled, target, drafts, 3), want) > 1e-2
        assert distance(toy.output_law(ExactVerify().sampled, target, drafts, 3), want) < TOL
