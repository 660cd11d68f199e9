"""Typical acceptance: its bars, its paths, and how much of the output it changes."""

from math import exp, log

import pytest
import torch

from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.speculative.stats import acceptance
from workbench.speculative.typical import SPEC, Config, bind, thresholds, typical
from workbench.speculative.verify import ExactVerify

FAIR = torch.full((4,), 0.25, dtype=torch.float64)
SURE = torch.tensor([0.97, 0.01, 0.01, 0.01], dtype=torch.float64)


def first(law, depth):
    return int(law.argmax())


def test_the_bar_is_epsilon_where_the_model_is_sure_and_sinks_with_entropy():
    bars = thresholds(torch.stack([SURE, FAIR, torch.eye(4, dtype=torch.float64)[2]]), 0.09, 0.3)
    assert bars[0] == bars[2] == 0.09
    assert float(bars[1]) == pytest.approx(0.3 * exp(-log(4)))


def test_unlikely_drafts_pass_where_the_model_is_unsure_only():
    for law, path in ((FAIR, (0,)), (SURE, ())):
        verdict = typical(DraftTree.chain([1], "toy"), law.repeat(2, 1), first, 0.09, 0.3)
        assert verdict.path == path and verdict.expected == (float(bool(path)),)
        assert verdict.mismatch == ((0.75,) if path else ())
        assert verdict.corrected == (not path)


def test_the_longest_path_wins_and_of_equal_ones_the_likeliest():
    p = torch.stack([torch.tensor([0.4, 0.35, 0.2, 0.05], dtype=torch.float64)] * 6)
    tree = DraftTree((0, 1, 2, 0, 3), (-1, -1, 0, 1, 2), "toy")  # 0-2-(3 fails), 1-0
    verdict = typical(tree, p, first, 0.09, 0.3)
    assert verdict.path == (1, 3)  # 0.35 * 0.4 beats 0.4 * 0.2
    assert verdict == Verdict((1, 3), 0, False, (1, 1, 1, 1, 0), pytest.approx((0.65, 0.6)))
    alone = typical(DraftTree((3, 0), (-1, 0), "toy"), p[:3], first, 0.09, 0.3)
    assert alone.path == () and alone.expected == (0.0,)  # nothing below a rejected node is tried


def test_expected_of_a_sampled_draft_is_the_chance_that_it_passes():
    q = torch.tensor([[0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    law = torch.tensor([0.6, 0.3, 0.06, 0.04], dtype=torch.float64)
    for token in range(4):
        verdict = typical(DraftTree.chain([token], "toy", q), law.repeat(2, 1), first, 0.09, 0.3)
        assert verdict.expected == pytest.approx((0.3,))
        assert bool(verdict.path) == (token < 2)


def test_at_temperature_zero_it_is_the_greedy_rule():
    checker = bind(Config())
    tree = DraftTree.chain([3, 1], "toy")
    assert checker.greedy(tree, [3, 2, 0]).path == (0,)
    assert checker.rule_for(tree, greedy=True) == "r1" and checker.rule_for(tree) == "typical"
    one_hot = torch.eye(4, dtype=torch.float64)[[3, 2, 0]]
    assert checker.sampled(tree, one_hot, first, lambda d, i: 0.0).path == (0,)


@pytest.mark.parametrize("vocab", [2, 7, 61])
def test_it_keeps_at_least_what_the_exact_rule_keeps_of_a_models_first_choices(vocab):
    """exp(-H) is at most the largest probability, so the bar, with δ < 1, is below it: the chance is 1."""
    sharp = torch.linspace(0, 8, 400, dtype=torch.float64)[:, None]
    laws = torch.randn(400, vocab, dtype=torch.float64) * sharp
    exact = ExactVerify()
    for p in laws.softmax(-1):
        tree = DraftTree.chain([int(p.argmax())], "toy")
        ours = typical(tree, p.repeat(2, 1), first, 0.09, 0.3)
        theirs = exact.sampled(tree, p.repeat(2, 1), first, lambda depth, i: 0.0)
        assert ours.path == (0,) and ours.expected == (1.0,)
        assert theirs.expected == pytest.approx((float(p.max()),))


def test_a_draft_of_first_choices_is_kept_whole_and_by_the_exact_rule_in_part(lab, scripted):
    """The engine, every step with drafts of what the model finds likeliest; laws from sharp to flat."""
    laws = (torch.randn(40, 61) * torch.linspace(0.5, 3, 40)[:, None]).to(torch.float64)

    class FirstChoices(scripted.Replay):
        def _one(self, context):
            begin, n = len(context.tokens), min(self.max_draft, context.room)
            draft = [int(laws[at - 1].argmax()) for at in range(begin, begin + n)]
            return DraftTree.chain(draft, self.name) if draft else None

    rates = {}
    for rule in ("verify", "typical"):
        engine = scripted.attach(lab.make_engine("paged", "ngram", rule), FirstChoices([], 4))
        scripted.say(engine, lambda seq, position: laws[position])
        with torch.inference_mode():
            ran = lab.run_engine(engine, [[1, 2, 3], [4, 5, 6]], max_tokens=30, temperature=1.0, seed=3)
        rates[rule] = acceptance([d for s in ran.steps for d in s.drafts]).rate
    assert rates["typical"] == 1.0
    assert 0 < rates["verify"] < 1  # 60 tokens, of which some have a chance of a quarter and less


def test_spd_20_the_lossy_rule_says_so_and_reports_its_measured_mismatch(lab):
    """Exact verification gives the plain tokens and no mismatch; typical acceptance neither."""
    prompts = [(p * 9)[:60] for p in lab.prompts_of(20, seed=2, low=4, high=9)]
    params = {"max_tokens": 24, "temperature": 0.8, "seed": 1}
    ids, stats = {}, {}
    for rule in ("", "verify", "typical"):
        with torch.inference_mode():
            made = lab.make_engine("paged", *(("ngram", rule) if rule else ()), pool=4096)
            ran = lab.run_engine(made, prompts, **params)
            ids[rule] = [ran.ids(f"r{i}") for i in range(20)]
            stats[rule] = acceptance([d for s in ran.steps for d in s.drafts])
    assert ids["verify"] == ids[""] != ids["typical"]
    assert stats["verify"].mismatch is None
    measured = stats["typical"].mismatch
    assert measured is not None and 0.01 < measured < 1
    with torch.inference_mode():
        greedy = [lab.run_engine(lab.make_engine("paged", "ngram", rule), prompts, max_tokens=24)
                  for rule in ("verify", "typical")]  # fmt: skip
    assert [greedy[0].ids(f"r{i}") for i in range(20)] == [greedy[1].ids(f"r{i}") for i in range(20)]
    assert SPEC.kind == "lossy" and not bind(Config()).exact
