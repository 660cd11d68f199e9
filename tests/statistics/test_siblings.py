"""R6 and sampled trees: exact to 1e-12, equal to the textbook form, and its wrong forms are caught."""

import itertools

import pytest
import torch

from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.engine.noise import Key, Stream, several
from workbench.spec.errors import InvariantError
from workbench.speculative import rules
from workbench.speculative.recursive import conditional_laws, drawn_without_replacement, recursive
from workbench.speculative.verify import ExactVerify

TOL = 1e-12


def families(draft, root=0, k=2, below=True):
    """Every tree of k siblings drawn without replacement, each with one sampled child, with its chance."""
    vocab = len(draft)
    for elder in itertools.permutations(range(vocab), k):
        law = draft[root]
        chance = 1.0
        for i, x in enumerate(elder):
            left = 1 - float(law[list(elder[:i])].sum())
            chance *= float(law[x]) / left if left > 0 else 0.0
        if chance <= 0:
            continue
        q = conditional_laws(law, elder)
        if not below:
            yield chance, DraftTree(elder, (-1,) * k, "toy", q)
            continue
        for younger in itertools.product(range(vocab), repeat=k):
            odds = chance * float(
                torch.stack([draft[a, b] for a, b in zip(elder, younger, strict=True)]).prod()
            )
            if odds > 0:
                yield odds, DraftTree((*elder, *younger), (*(-1,) * k, *range(k)), "toy",
                                      torch.cat([q, draft[list(elder)]]))  # fmt: skip


def textbook(law):
    """EAGLE's form: one draft law for all siblings; the rule itself takes rejected ones out of it."""

    def judge(tree, p, sample, coin):
        left, q = p[0], law
        for i, x in enumerate(tree.tokens):
            if coin(0, i) < float(left[x] / q[x]):
                return Verdict((i,), sample(p[i + 1], 1), False)
            left = rules.residual(left, q)
            q = q.index_fill(0, torch.tensor([x]), 0)
            q = q / q.sum() if float(q.sum()) > 0 else q
        return Verdict((), sample(left, 0), True)

    return judge


@pytest.mark.parametrize(("vocab", "k"), [(4, 2), (5, 2), (4, 3)])
@pytest.mark.parametrize("rule", [recursive, ExactVerify("r6").sampled, ExactVerify().sampled],
                         ids=["r6", "verify", "auto"])  # fmt: skip
def test_trees_without_replacement_keep_the_joint_law(toy, vocab, k, rule):
    target, draft = toy.models(vocab, 3)
    drafts = list(families(draft, k=k, below=k == 2))
    length = 3 if k == 2 else 2
    assert abs(sum(c for c, _ in drafts) - 1) < TOL
    law = toy.output_law(rule, target, drafts, length)
    assert float((law - toy.future(target, 0, length)).abs().max()) < TOL


def test_it_is_the_textbook_rule(toy):
    target, draft = toy.models(5, 4)
    for _, tree in families(draft, k=3, below=False):
        laws = []
        for rule in (recursive, textbook(draft[0])):
            law = {}
            for verdict, weight in toy.integrate(rule, tree, toy.rows(target, tree)):
                key = (verdict.path, verdict.token)
                law[key] = law.get(key, 0.0) + weight
            laws.append(law)
        for key in laws[0].keys() | laws[1].keys():
            assert abs(laws[0].get(key, 0.0) - laws[1].get(key, 0.0)) < TOL


def acceptance(toy, rule, target, drafts):
    return sum(
        c * w for c, tree in drafts for v, w in toy.integrate(rule, tree, toy.rows(target, tree)) if v.path
    )


def test_siblings_without_replacement_are_accepted_more_often_than_with(toy):
    for seed in range(3):
        target, draft = toy.models(4, seed)
        with_replacement = [
            (float(draft[0, a] * draft[0, b]), DraftTree((a, b), (-1, -1), "toy", draft[[0, 0]]))
            for a, b in itertools.product(range(4), repeat=2)
            if float(draft[0, a] * draft[0, b]) > 0
        ]
        one = acceptance(toy, rules.rejection, target, toy.sampled_chains(draft, 1))
        again = acceptance(toy, rules.rejection, target, with_replacement)
        fresh = acceptance(toy, recursive, target, families(draft, below=False))
        assert one < again < fresh


@pytest.mark.parametrize("wrong", ["raw law", "no residual", "no renormalisation", "young first"])
def test_wrong_siblings_are_caught(toy, wrong):
    target = torch.tensor([[0.42, 0.08, 0.35, 0.15]], dtype=torch.float64).repeat(4, 1)
    draft = torch.tensor([[0.3, 0.5, 0.15, 0.05]], dtype=torch.float64).repeat(4, 1)
    drafts = list(families(draft, below=False))
    rule = rules.rejection
    if wrong == "raw law":  # drawn without replacement, judged as if with
        drafts = [(c, DraftTree(t.tokens, t.parents, "toy", draft[[0, 0]])) for c, t in drafts]
    elif wrong == "no renormalisation":
        drafts = [(c, DraftTree(t.tokens, t.parents, "toy", draft[[0, 0]] * (t.q > 0))) for c, t in drafts]
    elif wrong == "young first":  # sorted after drawing: the order is part of the law
        in_order = {t.tokens: tuple(sorted(t.tokens)) for _, t in drafts}
        drafts = [
            (c, DraftTree(s, (-1, -1), "toy", conditional_laws(draft[0], s)))
            for c, s in ((c, in_order[t.tokens]) for c, t in drafts)
        ]
    else:

        def rule(tree, p, sample, coin):
            for i, x in enumerate(tree.tokens):
                if coin(0, i) < float(p[0, x] / tree.q[i, x]):
                    return Verdict((i,), sample(p[i + 1], 1), False)
            return Verdict((), sample(rules.residual(p[0], tree.q[-1]), 0), True)

    want = toy.future(target, 0, 2)
    law = toy.output_law(rule, target, drafts, 2)
    assert float((law - want).abs().sum()) / 2 > 5e-3
    right = toy.output_law(recursive, target, families(draft, below=False), 2)
    assert float((right - want).abs().max()) < TOL


def test_a_law_that_still_holds_an_elder_is_refused():
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    tree = DraftTree((0, 1), (-1, -1), "toy", q)
    with pytest.raises(InvariantError, match=r"node 1's law gives token 0 of node 0 0\.5"):
        recursive(tree, torch.full((3, 2), 0.5), lambda law, d: 0, lambda d, i: 0.9)
    with pytest.raises(InvariantError, match="Token 0 cannot be draw 2"):
        conditional_laws(torch.tensor([1.0, 0.0]), [0, 0])


def test_auto_tells_siblings_with_and_without_replacement_apart():
    q = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    checker = ExactVerify()
    trees = {
        "r2": DraftTree((0, 1), (-1, -1), "toy", q),
        "r6": DraftTree((0, 1), (-1, -1), "toy", conditional_laws(q[0], (0, 1))),
        "r3": DraftTree((0, 1), (-1, -1), "toy"),
    }
    assert {rule: checker.rule_for(tree) for rule, tree in trees.items()} == {r: r for r in trees}
    assert not drawn_without_replacement(DraftTree((1, 1), (-1, -1), "toy", q))
    assert checker.rule_for(DraftTree.chain((0, 1), "toy", q)) == "r2"


def test_the_winners_of_a_race_are_draws_without_replacement(toy):
    """Pairs of the first two, against the law of two draws without replacement."""
    _, draft = toy.models(6, 1)
    q = draft[0]
    want = torch.zeros(6, 6, dtype=torch.float64)
    for chance, tree in families(draft, below=False):
        want[tree.tokens] += chance
    counts = torch.zeros(6, 6, dtype=torch.long)
    for seed in range(10_000):
        counts[tuple(several(q, Key(seed, 0, 3, Stream.DRAFT), 2))] += 1
    assert toy.goodness(counts, want) > 1e-6
    assert toy.goodness(counts, q[:, None] * q) < 1e-6
    assert len(several(q, Key(0, 0, 3, Stream.DRAFT), 6)) == int((q > 0).sum())
