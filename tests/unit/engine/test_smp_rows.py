"""Sampling through the engine: failures other projects had, as tests."""

from __future__ import annotations

import random

import pytest
import torch

from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request

pytestmark = pytest.mark.usefixtures("inference")


def row(*values: float) -> torch.Tensor:
    """Logits that give ids from 0 on these values and the rest next to nothing."""
    out = torch.full((61,), -40.0)
    out[: len(values)] = torch.tensor(values)
    return out


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1e-4},
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 0.5, "top_p": 0.85},
    ],
    ids=str,
)
def test_smp_03_extreme_settings_keep_only_the_best_token(lab, scripted, sampling, drafted):
    engine = lab.make_engine("paged", "ngram", dtype="float32", numerics="fast")
    if drafted:
        scripted.attach(engine, scripted.Replay([[1, 2] + [0] * 12], 4))
    else:
        engine.drafting.drafter = None
    scripted.say(engine, lambda seq, position: row(2.0, 1.0, 0.0))
    for seed in range(6):
        ran = lab.run_engine(engine, [[1, 2]], max_tokens=12, seed=seed, **sampling)
        assert ran.ids() == [0] * 12
    assert any(s.drafts for s in ran.steps) == drafted


def test_smp_03_filters_see_the_temperature(lab, scripted):
    """At T = 1 the nucleus of 0.85 keeps two ids: the test above would not pass if T came after it."""
    engine = lab.make_engine("paged", dtype="float32", numerics="fast")
    scripted.say(engine, lambda seq, position: row(2.0, 1.0, 0.0))
    ran = lab.run_engine(engine, [[1, 2]], max_tokens=60, temperature=1.0, top_p=0.85)
    assert set(ran.ids()) == {0, 1}


MATES = [
    ([4, 4, 4, 9], SamplingParams(temperature=1.3, max_tokens=9, seed=42)),
    ([8, 1], SamplingParams(temperature=0.0, max_tokens=5)),
    (list(range(30)), SamplingParams(temperature=0.7, max_tokens=14, seed=7, top_k=5)),
    ([3, 3], SamplingParams(temperature=1.0, max_tokens=11, n=2, seed=1)),
]


@pytest.mark.parametrize("uses", [(), ("ngram:k=4",), ("chunked_prefill:budget=7", "ngram:k=3")], ids=str)
def test_smp_04_a_seeded_request_does_not_depend_on_its_batch(lab, uses):
    prompt = [7, 3, 7, 3, 7, 3, 1]
    mine = SamplingParams(temperature=4.0, top_p=0.97, max_tokens=20, seed=42)

    def run(order: list[int]) -> tuple[list[int], ...]:
        engine = lab.make_engine("paged", *uses, dtype="float32", numerics="pinned")
        for i in order:
            if i < 0:
                engine.add(Request("me", tuple(prompt), mine))
            else:
                engine.add(Request(f"m{i}", tuple(MATES[i][0]), MATES[i][1]))
        ran = lab.run_engine(engine)
        return tuple(ran.ids("me"))

    alone = run([-1])
    assert len(set(alone)) > 3
    order = [-1, *range(len(MATES))]
    for seed in (1, 2):
        random.Random(seed).shuffle(order)
        assert run(order) == alone


def test_smp_04_what_one_seed_means_for_several_prompts_and_samples(lab):
    """Sample 0 of n equals the run with n = 1; one seed says the same for equal prompts; others differ."""
    engine = lab.make_engine("paged", dtype="float32", numerics="pinned")
    kw = {"temperature": 5.0, "max_tokens": 12}
    one = lab.run_engine(engine, [[5, 6, 7]], seed=42, **kw)
    many = lab.run_engine(engine, [[5, 6, 7]], seed=42, n=3, **kw)
    twice = lab.run_engine(engine, [[5, 6, 7]] * 2, seed=42, **kw)
    other = lab.run_engine(engine, [[5, 6, 7]], seed=43, **kw)
    assert many.ids("r0", 0) == one.ids() == twice.ids("r0") == twice.ids("r1")
    assert len({tuple(many.ids("r0", i)) for i in range(3)}) == 3
    assert other.ids() != one.ids()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_end_their_own_request_with_an_error(lab, scripted, temperature, value):
    engine = lab.make_engine("paged", dtype="float32", numerics="fast")

    def says(seq: int, position: int):
        return row(1.0, value) if seq == 1 and position == 4 else row(0.0, 2.0, 0.0)

    scripted.say(engine, says)
    ran = lab.run_engine(engine, [[5, 6], [7, 8, 9]], max_tokens=8, temperature=temperature)
    assert len(ran.ids("r0")) == 3  # what it had before stays
    assert ran.finish("r0") == "error"
    last = ran._of("r0", 0)[-1]
    assert last.error is not None
    assert "not finite" in last.error["message"]
    assert ran.finish("r1") == "length"
    assert len(ran.ids("r1")) == 8
    assert engine.kv.pools[0].used == 0
