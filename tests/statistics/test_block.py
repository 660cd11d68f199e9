"""R5, block verification: exact to 1e-12, never shorter than R2, and its wrong forms are caught."""

import itertools

import pytest
import torch

from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.engine.sampling import until_end
from workbench.spec.errors import InvariantError
from workbench.speculative import block as module
from workbench.speculative import rules
from workbench.speculative.block import block, reach_chances

TOL = 1e-12


def mean_length(toy, rule, target, draft, k):
    return sum(
        chance * weight * len(verdict.path)
        for chance, tree in toy.sampled_chains(draft, k)
        for verdict, weight in toy.integrate(rule, tree, toy.rows(target, tree))
    )


@pytest.mark.parametrize(("vocab", "k"), [(2, 1), (2, 3), (3, 3), (4, 2), (6, 2)])
@pytest.mark.parametrize("seed", [0, 1])
def test_sampled_chains_keep_the_joint_law(toy, vocab, k, seed):
    target, draft = toy.models(vocab, seed)
    law = toy.output_law(block, target, toy.sampled_chains(draft, k), k + 1)
    assert float((law - toy.future(target, 0, k + 1)).abs().max()) < TOL


def said(toy, rule, target, drafts):
    """Law of what a round emits, with how many drafts it kept, up to the end token 1."""
    law = {}
    for chance, tree in drafts:
        for verdict, weight in toy.integrate(rule, tree, toy.rows(target, tree)):
            out = (*(tree.tokens[i] for i in verdict.path), verdict.token)
            end = out.index(1) + 1 if 1 in out else len(out)
            key = (out[:end], min(end, len(verdict.path)))
            law[key] = law.get(key, 0.0) + chance * weight
    return law


@pytest.mark.parametrize("rule", [block, rules.rejection, lambda t, p, s, c: rules.match(t, p, s)])
@pytest.mark.parametrize("seed", [0, 1])
def test_chains_cut_behind_an_end_token_change_no_law(toy, rule, seed):
    """Of the tokens, and of what a round says until its end, though a block is judged as a whole."""
    target, draft = toy.models(3, seed)
    cut = [(chance, until_end(tree, {1})) for chance, tree in toy.sampled_chains(draft, 3)]
    assert {len(tree.tokens) for _, tree in cut} == {1, 2, 3}
    assert float((toy.output_law(rule, target, cut, 4) - toy.future(target, 0, 4)).abs().max()) < TOL
    whole, ended = (said(toy, rule, target, d) for d in (toy.sampled_chains(draft, 3), cut))
    for key in whole.keys() | ended.keys():
        assert abs(whole.get(key, 0.0) - ended.get(key, 0.0)) < TOL


def test_cutting_in_front_of_the_end_token_is_caught(toy):
    """Dropping a token because of what it is, after it was drawn, is no stop of the drafter's."""

    def before(tree):
        n = tree.tokens.index(1) if 1 in tree.tokens else len(tree.tokens)
        return DraftTree.chain(tree.tokens[:n], "toy", tree.q[:n])

    target, draft = toy.models(3, 0)
    cut = [(chance, before(tree)) for chance, tree in toy.sampled_chains(draft, 3)]
    law = toy.output_law(block, target, [(c, t) for c, t in cut if t.tokens], 4)
    none = sum(c for c, t in cut if not t.tokens) * toy.future(target, 0, 4)
    assert float((law + none - toy.future(target, 0, 4)).abs().sum()) / 2 > 1e-2


@pytest.mark.parametrize("seed", range(4))
def test_expected_length_is_the_sum_of_reach_chances_and_at_least_that_of_r2(toy, seed):
    target, draft = toy.models(4, seed)
    lengths = {k: mean_length(toy, block, target, draft, k) for k in (1, 3)}
    for k, mean in lengths.items():
        closed = sum(
            chance * sum(reach_chances(tree, toy.rows(target, tree)))
            for chance, tree in toy.sampled_chains(draft, k)
        )
        assert abs(mean - closed) < TOL
    assert lengths[1] == pytest.approx(mean_length(toy, rules.rejection, target, draft, 1), abs=TOL)
    assert lengths[3] > mean_length(toy, rules.rejection, target, draft, 3) - TOL


def test_the_papers_example(toy):
    """p = (1/3, 2/3), q = (2/3, 1/3), two drafts: R2 keeps 10/9 tokens, blocks 11/9."""
    target = torch.tensor([[1, 2], [1, 2]], dtype=torch.float64) / 3
    draft = target.flip(-1)
    assert mean_length(toy, rules.rejection, target, draft, 2) == pytest.approx(10 / 9, abs=TOL)
    assert mean_length(toy, block, target, draft, 2) == pytest.approx(11 / 9, abs=TOL)


def test_a_perfect_drafter_is_kept_whole(toy):
    target, _ = toy.models(4, 0)
    for _, tree in toy.sampled_chains(target, 3):
        outcomes = toy.integrate(block, tree, toy.rows(target, tree))
        assert all(v.path == (0, 1, 2) and not v.corrected for v, _ in outcomes)


def test_drafts_the_target_forbids_are_never_kept(toy):
    target, draft = toy.models(4, 0)  # the target never says 0
    for _, tree in toy.sampled_chains(draft, 2):
        if tree.tokens[0] == 0:
            assert all(v.path == () for v, _ in toy.integrate(block, tree, toy.rows(target, tree)))


def distance(toy, rule, k=3):
    """Of a drafter that is wrong about everything, so that every part of the rule is used often."""
    target = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).repeat(4, 1)
    draft = torch.tensor([[0.1, 0.1, 0.3, 0.5]], dtype=torch.float64).repeat(4, 1)
    law = toy.output_law(rule, target, toy.sampled_chains(draft, k), k + 1)
    return float((law - toy.future(target, 0, k + 1)).abs().sum()) / 2


def test_stopping_at_the_first_failed_coin_is_caught(toy):
    """R2's habit with R5's chances."""

    def first_failure(tree, p, sample, coin):
        reach = [1.0, *reach_chances(tree, p)]
        n = len(tree.tokens)
        for i in range(n):
            h = module._chance(reach[i + 1], p[i + 1], tree.q[i + 1]) if i + 1 < n else reach[n]
            if not coin(i, 0) < h:
                return Verdict(tuple(range(i)), sample(rules.residual(p[i], tree.q[i], reach[i]), i), True)
        return Verdict(tuple(range(n)), sample(p[n], n), False)

    assert distance(toy, block) < TOL
    assert distance(toy, first_failure) > 1e-2


@pytest.mark.parametrize(
    "what", ["residual without its weight", "chance without its weight", "uncapped reach"]
)
def test_wrong_blocks_are_caught(toy, monkeypatch, what):
    if what == "residual without its weight":
        monkeypatch.setattr(module, "residual", lambda p, q, weight: rules.residual(p, q))
    elif what == "chance without its weight":
        real = module._chance
        monkeypatch.setattr(module, "_chance", lambda reach, p, q: real(reach, p, q) * reach)
    else:
        monkeypatch.setattr(module, "min", lambda a, b: b, raising=False)
        monkeypatch.setattr(module, "_chance", lambda reach, p, q: min(reach, 1.0))
    assert distance(toy, block) > 5e-3


def test_branches_and_missing_laws_are_refused():
    p = torch.full((3, 2), 0.5)
    never = pytest.fail
    with pytest.raises(InvariantError, match="a tree with branches"):
        block(DraftTree((0, 1), (-1, -1), "toy", torch.full((2, 2), 0.5)), p, never, never)
    with pytest.raises(InvariantError, match="no draft law"):
        block(DraftTree.chain([0, 1], "toy"), p, never, never)
    with pytest.raises(InvariantError, match="drew token 1 from a law that gives it 0"):
        block(DraftTree.chain([1], "toy", torch.tensor([[1.0, 0.0]])), p[:2], lambda *a: 0, lambda *a: 0.5)


def test_expected_is_the_overlap_of_every_place_reached(toy):
    target, draft = toy.models(4, 3)
    for _, tree in itertools.islice(toy.sampled_chains(draft, 2), 6):
        p = toy.rows(target, tree)
        overlap = torch.minimum(p[:2], tree.q).sum(-1).tolist()
        for verdict, _ in toy.integrate(block, tree, p):
            assert verdict.expected == pytest.approx(overlap[: len(verdict.path) + 1])
