"""Closed forms against enumeration of every outcome, and against simulation where there is no end of them."""

import itertools
import random

import pytest

from workbench.spec.errors import OptionError
from workbench.speculative import predict


def outcomes(conditional):
    """(probability, tokens) of every pattern of coins of a chain, the first failure ends it."""
    for coins in itertools.product((True, False), repeat=len(conditional)):
        weight = 1.0
        for coin, chance in zip(coins, conditional, strict=True):
            weight *= chance if coin else 1 - chance
        kept = next((i for i, coin in enumerate(coins) if not coin), len(coins))
        yield weight, kept + 1


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 4, 7])
def test_tokens_of_a_chain_are_the_mean_over_all_coins(alpha, gamma):
    mean = sum(w * n for w, n in outcomes([alpha] * gamma))
    assert predict.expected_tokens(alpha, gamma) == pytest.approx(mean, abs=1e-12)
    if alpha < 1:
        assert mean == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha), abs=1e-12)


def test_tokens_by_survival_hold_for_positions_that_differ():
    conditional = [0.9, 0.2, 0.7, 0.5]
    survival = list(itertools.accumulate(conditional, lambda a, b: a * b))
    mean = sum(w * n for w, n in outcomes(conditional))
    assert predict.expected_tokens_of(survival) == pytest.approx(mean, abs=1e-12)
    assert predict.expected_tokens_of([0.6**i for i in range(1, 5)]) == pytest.approx(
        predict.expected_tokens(0.6, 4)
    )


def walks(parents, accept, node=-1):
    """(probability, tokens) of every path a verdict can take: one child is taken, or none."""
    below = [i for i, p in enumerate(parents) if p == node]
    yield 1 - sum(accept[i] for i in below), 1
    for child in below:
        for weight, tokens in walks(parents, accept, child):
            yield accept[child] * weight, tokens + 1


def test_tokens_of_a_tree_are_the_mean_over_all_paths():
    parents = (-1, -1, 0, 0, 1, 3, 3)
    accept = (0.5, 0.3, 0.4, 0.35, 0.9, 0.6, 0.25)
    paths = list(walks(parents, accept))
    assert sum(w for w, _ in paths) == pytest.approx(1)
    mean = sum(w * n for w, n in paths)
    assert predict.expected_tokens_of_tree(parents, accept) == pytest.approx(mean, abs=1e-12)
    chain = predict.expected_tokens_of_tree(range(-1, 4), [0.6] * 5)
    assert chain == pytest.approx(predict.expected_tokens(0.6, 5))
    with pytest.raises(OptionError, match=r"probability 1\.1"):
        predict.expected_tokens_of_tree((-1, -1), (0.6, 0.5))
    with pytest.raises(OptionError, match="not before it"):
        predict.expected_tokens_of_tree((0,), (0.5,))


def clock(rounds, draw, verify, gamma, draft, overhead):
    """Tokens over time of a simulated run; plain decoding has one token per unit."""
    tokens = sum(draw() for _ in range(rounds))
    return tokens / (rounds * (verify + gamma * draft + overhead))


@pytest.mark.parametrize(
    ("alpha", "gamma", "verify", "draft", "overhead"), [(0.7, 4, 1.3, 0.1, 0.05), (0.3, 2, 1.0, 0.3, 0.0)]
)
def test_speedup_is_that_of_a_simulated_run(alpha, gamma, verify, draft, overhead):
    rng = random.Random(7)

    def draw():
        return 1 + next((i for i in range(gamma) if rng.random() >= alpha), gamma)

    simulated = clock(100_000, draw, verify, gamma, draft, overhead)
    gain = predict.speedup(predict.expected_tokens(alpha, gamma), gamma, verify, draft, overhead)
    assert gain == pytest.approx(simulated, rel=0.01)


def test_known_values_of_the_literature():
    # Leviathan et al., table 1: operations and speed-up at c = c^ = 0 (their columns, 2 digits)
    assert predict.operations(0.6, 2, 0.0) == pytest.approx(1.53, abs=0.005)
    assert predict.leviathan(0.6, 2, 0.0) == pytest.approx(1.96, abs=0.005)
    assert predict.operations(0.8, 5, 0.0) == pytest.approx(1.63, abs=0.005)
    assert predict.leviathan(0.8, 5, 0.0) == pytest.approx(3.69, abs=0.005)
    assert predict.leviathan(0.9, 10, 0.0) == pytest.approx(6.86, abs=0.005)


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.55, 0.9])
@pytest.mark.parametrize("draft", [0.0, 0.1, 0.3, 0.6])
def test_something_is_gained_exactly_where_acceptance_exceeds_cost(alpha, draft):
    best = max(predict.leviathan(alpha, gamma, draft) for gamma in range(1, 40))
    assert (best > 1) == predict.can_pay(alpha, draft)
    gamma, gain = predict.best_gamma(alpha, lambda rows: 1.0, draft, most=39)
    assert gain == pytest.approx(max(best, 1.0)) and (gamma == 0) == (best <= 1)


def test_overlap_hides_the_draft_and_never_more():
    tokens = predict.expected_tokens(0.7, 4)
    serial = predict.speedup(tokens, 4, 1.2, 0.2)
    assert predict.parallel(tokens, 4, 1.2, 0.2) == pytest.approx(serial * (1.2 + 0.8) / 1.2)
    assert predict.parallel(tokens, 4, 1.2, 0.5) == pytest.approx(tokens / 2.0)
    assert predict.parallel(tokens, 4, 1.2, 0.0) == predict.speedup(tokens, 4, 1.2, 0.0)


def test_asynchronous_drafting_is_the_rate_of_a_simulated_renewal_process():
    rng = random.Random(3)
    hit, on_hit, on_miss, verify, ahead, backup = 0.65, 3.2, 2.4, 1.1, 1.6, 0.9
    tokens = time = 0.0
    for _ in range(200_000):
        found = rng.random() < hit
        tokens += on_hit if found else on_miss
        time += max(verify, ahead) if found else verify + backup
    got = predict.asynchronous(hit, on_hit, on_miss, verify, ahead, backup)
    assert got == pytest.approx(tokens / time, rel=0.005)
    assert predict.asynchronous(1.0, on_hit, on_miss, verify, ahead, backup) == pytest.approx(
        predict.parallel(on_hit, 1, verify, ahead)
    )


def test_the_batch_at_which_verification_stops_being_free():
    assert predict.ridge(989e12, 3.35e12, 2) == pytest.approx(295, abs=1)  # H100, bf16
    assert predict.roofline(100, 295) == 1 and predict.roofline(590, 295) == 2
    assert predict.roofline(4, 0.5) == 4  # arithmetic alone: rows cost what they are

    def step(rows):
        return 10 * predict.roofline(rows, 40)

    tokens = predict.expected_tokens(0.6, 4)
    batches = [2**i for i in range(8)]

    def gain(batch, share=1.0):
        return predict.speedup_of_share(share, tokens, step(5 * batch) / step(batch))

    gains = [gain(b) for b in batches]
    assert gains[:4] == pytest.approx([tokens] * 4)  # 8 × 5 rows are just free
    assert gains[-1] == pytest.approx(tokens / 5)  # at the roof rows cost what they are
    at = predict.crossover(batches, gains)
    assert at is not None and 16 < at < 32
    assert gain(at) == pytest.approx(1, abs=0.15)
    assert gain(1, 0.0) == 1 and gain(1, 0.5) == pytest.approx((tokens + 1) / 2)  # steps without drafts
    with pytest.raises(OptionError, match="share"):
        gain(1, 1.5)


def test_crossover_of_curves_that_do_not_cross():
    assert predict.crossover([1, 2], [1.5, 1.2]) is None
    assert predict.crossover([1, 2], [0.9, 0.8]) == 1
    assert predict.crossover([1, 4], [1.5, 0.5]) == pytest.approx(2)
    assert predict.crossover([], []) is None


@pytest.mark.parametrize("alpha", [-0.1, 1.1])
def test_no_probability_no_prediction(alpha):
    with pytest.raises(OptionError, match="no probability"):
        predict.expected_tokens(alpha, 3)
    with pytest.raises(OptionError, match="no probability"):
        predict.asynchronous(alpha, 1, 1, 1, 1, 1)
    with pytest.raises(OptionError, match="below 0"):
        predict.expected_tokens(0.5, -1)
    with pytest.raises(OptionError, match="costs nothing"):
        predict.speedup(1.0, 0, 0.0, 0.0)
