"""Noise is a pure function of its key."""

import numpy as np
import pytest
import torch

from workbench.engine.noise import Key, Stream, sample, uniform, uniforms
from workbench.engine.params import SamplingParams
from workbench.engine.processing import process
from workbench.engine.sampling import PositionNoise


def test_philox_reference_values():
    """Pins the stream: a changed value would silently change every seeded run."""
    bits = np.random.Philox(
        key=np.array([42, 0], dtype=np.uint64), counter=np.array([0, 3, 1, 2], dtype=np.uint64)
    )
    want = (bits.random_raw(4) >> np.uint64(11)) * 2.0**-53
    assert uniforms(Key(42, 2, 3, Stream.COIN), 4).tolist() == want.tolist()
    assert uniforms(Key(0, 0, 0), 2).tolist() == pytest.approx(PINNED, abs=0)


PINNED = [0.011546754286331562, 0.24154919656271812]


def test_a_longer_vector_starts_with_the_shorter_one():
    key = Key(7, 0, 100)
    assert uniforms(key, 5).tolist() == uniforms(key, 50)[:5].tolist()
    assert uniform(key, 3) == uniforms(key, 9)[3]


def test_every_field_of_the_key_matters():
    base = Key(1, 2, 3, Stream.TOKEN)
    others = [
        base._replace(**{f: v})
        for f, v in (("seed", 9), ("sample", 9), ("position", 9), ("stream", 1), ("ahead", 1))
    ]
    swapped = [Key(1, 3, 2, 0), Key(2, 1, 3, 0), Key(3, 2, 1, 0)]
    values = {uniform(k) for k in (base, *others, *swapped)}
    assert len(values) == 9
    assert uniform(Key(2**64 - 1, 0, 0)) != uniform(Key(0, 0, 0))


def test_sample_is_gumbel_max():
    law = torch.randn(500, dtype=torch.float64).softmax(-1)
    for position in range(50):
        key = Key(1, 0, position)
        gumbel = -np.log(-np.log(uniforms(key, 500)))
        assert sample(law, key) == int(np.argmax(np.log(law.numpy()) + gumbel))


def test_a_token_without_probability_is_never_drawn():
    law = torch.zeros(1000)
    law[[17, 400]] = torch.tensor([1e-30, 1.0])
    assert {sample(law, Key(0, 0, i)) for i in range(200)} == {400}
    assert sample(torch.eye(4)[2], Key(0, 0, 0)) == 2


def test_scale_and_filters_do_not_move_the_noise():
    """A token that survives a filter and would have won before it wins after it."""
    law = torch.randn(200, dtype=torch.float64).softmax(-1)
    for i in range(50):
        y = sample(law, Key(5, 0, i))
        less = torch.where(torch.arange(200) % 2 == y % 2, law, 0)
        assert sample(less, Key(5, 0, i)) == sample(3 * less, Key(5, 0, i)) == y


def test_smp_04_noise_does_not_depend_on_batch_mates():
    """Seed 42 alone and as one row of two batch orders draws the same ids; samples of one seed differ."""
    torch.manual_seed(0)
    logits = torch.randn(12, 300)
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=42)

    def draw(order, row=3, index=0):
        laws = process(logits[order], params)
        at = order.index(row)
        return [PositionNoise(params.seed, index, 10).token(laws[at], depth) for depth in range(20)]

    alone = draw([3])
    assert draw([1, 3, 5]) == draw([5, 9, 0, 3]) == alone
    assert draw([3], index=1) != alone


def test_streams_of_a_position_differ():
    noise = PositionNoise(3, 0, 50)
    law = torch.full((4096,), 1 / 4096, dtype=torch.float64)
    assert noise.token(law, 2) != noise.draft(law, 2)
    assert noise.token(law, 2) == PositionNoise(3, 0, 52).token(law, 0)
    assert noise.coin(1, 0) != noise.coin(1, 1)


def test_the_next_round_draws_tokens_by_position_and_has_fresh_coins_and_drafts():
    """What was drafted and not kept may have decided that it was not: its noise must not come again."""
    law = torch.full((4096,), 1 / 4096, dtype=torch.float64)
    noise, later = PositionNoise(3, 0, 50), PositionNoise(3, 0, 51)
    assert noise.token(law, 1) == later.token(law, 0)
    assert noise.coin(1, 0) != later.coin(0, 0)
    assert noise.draft(law, 1) != later.draft(law, 0)
