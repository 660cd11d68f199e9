"""Rules and the ``verify`` technique: paths, refusals, and seeded runs that drafts cannot change."""

import random

import pytest
import torch

from workbench.engine.draft_seams import DraftContext, DraftTree, Verdict
from workbench.engine.params import SamplingParams
from workbench.engine.processing import process
from workbench.engine.sampling import PositionNoise
from workbench.spec.errors import InvariantError, OptionError
from workbench.spec.technique import make_config, options_of
from workbench.speculative import ngram, rules, verify

EMPTY = DraftTree((), (), "")
TREE = DraftTree((5, 6, 7, 8), (-1, -1, 1, 2), "toy")  # root: 5 | 6 → 7 → 8


def never(*_):
    raise AssertionError("noise was used")


def test_r1_follows_the_models_choice_through_siblings():
    assert rules.greedy(TREE, [6, 0, 7, 1, 0]) == Verdict((1, 2), 1, True, (0.0, 1.0, 1.0, 0.0))
    assert rules.greedy(TREE, [6, 0, 7, 8, 2]) == Verdict((1, 2, 3), 2, False, (0.0, 1.0, 1.0, 1.0))
    assert rules.greedy(TREE, [5, 3, 0, 0, 0]) == Verdict((0,), 3, False, (1.0,))
    assert rules.greedy(TREE, [9, 0, 0, 0, 0]) == Verdict((), 9, True, (0.0, 0.0))
    assert rules.greedy(EMPTY, [4]) == Verdict((), 4, False)


def test_duplicate_siblings_are_taken_once():
    tree = DraftTree((5, 5), (-1, -1), "toy")
    assert rules.greedy(tree, [5, 1, 2]).path == (0,)
    p = torch.tensor([0.25, 0.75]).repeat(3, 1)
    verdict = rules.match(DraftTree((1, 1), (-1, -1), "toy"), p, lambda law, depth: 0)
    assert verdict == Verdict((), 0, True, (0.75, 0.0))


def test_residual_where_nothing_is_left_is_p_itself():
    p = torch.tensor([0.25, 0.75])
    assert torch.equal(rules.residual(p, p), p)
    assert rules.residual(p, torch.tensor([0.75, 0.25])).tolist() == [0.0, 1.0]


def random_target(seed, vocab):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(vocab, vocab, generator=g, dtype=torch.float64) * 1.5


def generate(logits, params, length, drafter, rule="auto"):
    """A Markov target decoded in rounds; ``drafter(ids)`` gives a tree or None."""
    checker = verify.bind(verify.Config(rule))
    ids, steps = [0], 0
    while len(ids) <= length:
        tree = drafter(ids) or EMPTY
        law = process(logits[[ids[-1], *tree.tokens]], params)
        noise = PositionNoise(params.seed, 0, len(ids))
        if params.greedy:
            verdict = checker.greedy(tree, law.argmax(-1).tolist())
        else:
            verdict = checker.sampled(tree, law, noise.token, noise.coin)
        ids += [*(tree.tokens[i] for i in verdict.path), verdict.token]
        steps += 1
    return ids[1 : length + 1], steps


def drafters(vocab):
    rng = random.Random(1)

    def branching(ids):
        return DraftTree(tuple(rng.choices(range(vocab), k=6)), (-1, -1, -1, 0, 1, 3), "toy")

    def lookup(ids):
        index = ngram.NgramIndex(ngram.Config(k=4, min_n=1))
        index.extend(ids)
        found = index.followers(4)
        return DraftTree.chain(found, "ngram") if found else None

    return {
        "random chains": lambda ids: DraftTree.chain(rng.choices(range(vocab), k=rng.randint(1, 5)), "toy"),
        "random trees": branching,
        "lookup": lookup,
        "always wrong": lambda ids: DraftTree.chain([0, 0, 0], "toy"),
    }


SETTINGS = [
    SamplingParams(temperature=t, top_k=k, seed=s)
    for t, k, s in ((0, 0, 0), (0.7, 0, 1), (1, 4, 2), (1.5, 0, 3))
]


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("rule", ["auto", "r3", "r4"])
def test_a_seeded_run_gives_the_same_ids_with_and_without_drafts(params, rule):
    vocab = 12
    logits = random_target(7, vocab)
    plain, steps = generate(logits, params, 60, lambda ids: None)
    assert steps == 60
    helped = 0
    for name, drafter in drafters(vocab).items():
        ids, steps = generate(logits, params, 60, drafter, rule)
        assert ids == plain, name
        helped += steps < 60
    assert helped >= 3


def test_a_perfect_drafter_is_accepted_whole_and_an_adversary_costs_nothing_but_time():
    """G8 with the engine's noise: R2 on q = p, R1 on the greedy path, and an id the target never says."""
    vocab, k = 8, 3
    logits = random_target(3, vocab)
    logits[:, 0] = -torch.inf
    params = SamplingParams(temperature=0.8, seed=4)
    law = process(logits, params)

    def perfect(ids):
        noise, tokens = PositionNoise(9, 0, len(ids)), [ids[-1]]
        for depth in range(k):
            tokens.append(noise.draft(law[tokens[-1]], depth))
        return DraftTree.chain(tokens[1:], "toy", law[tokens[:-1]])

    def greedy_path(ids):
        tokens = [ids[-1]]
        for _ in range(k):
            tokens.append(int(law[tokens[-1]].argmax()))
        return DraftTree.chain(tokens[1:], "toy")

    assert generate(logits, params, 80, perfect)[1] == 20
    assert generate(logits, SamplingParams(), 80, greedy_path)[1] == 20
    for p in (params, SamplingParams()):
        wrong = generate(logits, p, 40, lambda ids: DraftTree.chain([0, 0, 0], "toy"))
        assert wrong == (generate(logits, p, 40, lambda ids: None)[0], 40)


def test_auto_takes_the_rule_that_fits_the_draft():
    checker = verify.bind(verify.Config())
    sampled = DraftTree.chain([1], "draft", torch.tensor([[0.5, 0.5]]))
    assert (checker.rule_for(TREE), checker.rule_for(sampled), checker.rule_for(EMPTY)) == ("r3", "r2", "r3")
    assert checker.exact and verify.SPEC.kind == "exact"


def test_a_rule_that_cannot_judge_a_draft_says_which_can():
    sampled = DraftTree.chain([1], "draft", torch.tensor([[0.5, 0.5]]))
    p = torch.full((2, 2), 0.5)
    with pytest.raises(OptionError, match=r"'r2' needs the law .* ngram has none.*auto or r3"):
        verify.bind(verify.Config("r2")).sampled(DraftTree.chain([1], "ngram"), p, never, never)
    with pytest.raises(OptionError, match=r"'r3' is for deterministic drafts; draft samples.*r2"):
        verify.bind(verify.Config("r3")).sampled(sampled, p, never, never)
    for rule in ("r2", "r3", "r4", "auto"):  # no draft suits every rule
        verdict = verify.bind(verify.Config(rule)).sampled(EMPTY, p[:1], lambda law, depth: 1, never)
        assert verdict == Verdict((), 1, False)


def test_spd_10_a_smaller_draft_vocabulary_has_probability_zero_beyond_it():
    p = torch.tensor([[0.25, 0.25, 0.5], [0.0, 0.0, 1.0]], dtype=torch.float64)
    tree = DraftTree.chain([0], "draft", torch.tensor([[0.5, 0.5]]))
    seen = []
    verdict = rules.rejection(tree, p, lambda law, depth: seen.append(law.tolist()) or 2, lambda d, i: 0.9)
    assert seen == [[0.0, 0.0, 1.0]]  # the residual is what the drafter lacks
    assert verdict == Verdict((), 2, True, (0.5,))


def test_spd_10_ids_and_laws_beyond_the_target_are_refused_by_name():
    p = torch.full((2, 2), 0.5)
    with pytest.raises(InvariantError, match="draft drafted token 2, which the target lacks"):
        rules.match(DraftTree.chain([2], "draft"), p, never)
    wide = DraftTree.chain([0], "draft", torch.tensor([[0.5, 0.25, 0.25]]))
    with pytest.raises(InvariantError, match="draft drafts from 3 ids, the target has 2"):
        rules.rejection(wide, p, never, never)
    padded = DraftTree.chain([0], "draft", torch.tensor([[0.5, 0.5, 0.0]]))
    assert rules.rejection(padded, p, lambda law, depth: 1, lambda d, i: 0.5).path == (0,)


@pytest.mark.parametrize(
    ("tree", "rows"),
    [
        (DraftTree((1,), (0,), "toy"), 2),
        (DraftTree((1,), (-2,), "toy"), 2),
        (DraftTree((-1,), (-1,), "toy"), 2),
        (DraftTree((1, 1), (-1,), "toy"), 3),
        (DraftTree((1,), (-1,), "toy"), 1),
    ],
)
def test_malformed_trees_are_refused(tree, rows):
    with pytest.raises(InvariantError, match="toy"):
        rules.greedy(tree, [0] * rows)
    with pytest.raises(InvariantError, match="toy"):
        rules.match(tree, torch.full((rows, 4), 0.25), never)


def test_spd_02_a_token_that_its_law_cannot_give_is_refused():
    tree = DraftTree.chain([1], "draft", torch.tensor([[1.0, 0.0]]))
    with pytest.raises(InvariantError, match="drew token 1 from a law that gives it 0"):
        rules.rejection(tree, torch.full((2, 2), 0.5), never, lambda d, i: 0.0)
    with pytest.raises(InvariantError, match="no draft law"):
        rules.rejection(DraftTree.chain([1, 1], "draft", torch.ones(1, 2)), torch.ones(3, 2), never, never)


def test_spd_20_only_the_exact_rules_carry_the_exact_label():
    """A threshold rule (keep x when p(x) > .3) run the same way does change greedy output, and says so."""

    class Threshold(verify.ExactVerify):
        exact = False

        def greedy(self, tree, best):
            ok = [i for i, t in enumerate(tree.tokens) if float(law[0, t]) > 0.3]
            return Verdict((0,), best[1], False) if ok[:1] == [0] else rules.greedy(tree, best)

    law = torch.tensor([[0.6, 0.4], [0.6, 0.4]])
    tree = DraftTree.chain([1], "toy")
    best = law.argmax(-1).tolist()
    exact = verify.bind(make_config(verify.Config, {}, "verify"))
    outputs = {rule.exact: rule.greedy(tree, best) for rule in (exact, Threshold())}
    assert outputs[True] == Verdict((), 0, True, (0.0,))
    assert outputs[False].path == (0,)
    choices = {o.name: o.choices for o in options_of(verify.Config)}["rule"]
    assert all(verify.bind(verify.Config(rule)).exact for rule in choices)


def test_drafting_contexts_of_ngram_suit_the_rules():
    drafter = ngram.bind(ngram.Config())
    drafter.begin(1, [1, 2, 1])
    (tree,) = drafter.propose([DraftContext(1, [1, 2, 1], 8, False)])
    assert tree is not None and tree.q is None and verify.bind(verify.Config()).rule_for(tree) == "r3"


def test_a_rule_that_cannot_judge_a_sampled_draft_ends_that_request_alone(lab):
    prompts = lab.prompts_of(2, seed=1, low=6, high=12)
    params = [SamplingParams(max_tokens=8, ignore_eos=True, temperature=t) for t in (0.0, 1.0)]
    plain = lab.run_engine(lab.make_engine("paged"), prompts[:1], params=params[:1])
    ran = lab.run_engine(lab.make_engine("paged", "layerskip", "verify:rule=r3"), prompts, params=params)
    assert ran.ids("r0") == plain.ids("r0") and ran.finish("r0") == "length"
    assert ran.finish("r1") == "error"
    (error,) = [e.error for e in ran.events if e.error]
    assert "layerskip samples its drafts" in error["message"] and "r4" in error["hint"]
