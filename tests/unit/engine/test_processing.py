"""Order of the processors, ties, extremes, and rows that see their own path only."""

import math

import pytest
import torch

from workbench.engine.params import SamplingParams as P
from workbench.engine.processing import best, first_max, logprobs, process, scores
from workbench.spec.errors import MaskError, RequestError

LOGITS = torch.tensor([[2.0, 1.0, 0.0]])


def kept(law):
    return [row.nonzero()[:, 0].tolist() for row in law]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "params",
    [
        P(),
        P(temperature=1e-4),
        P(temperature=1.0, top_p=1e-6),
        P(temperature=0.5, top_p=0.85),
        P(temperature=1e-300),
    ],
)
def test_smp_03_cold_and_narrow_laws_are_one_hot(params, dtype):
    law = process(LOGITS.to(dtype), params)
    assert law.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert law.tolist() == [[1.0, 0.0, 0.0]]


def test_smp_03_filters_come_after_temperature():
    """.867 alone passes .85 at T = .5; at T = 1 (.665) the second token is needed."""
    assert kept(process(LOGITS, P(temperature=0.5, top_p=0.85))) == [[0]]
    assert kept(process(LOGITS, P(temperature=1.0, top_p=0.85))) == [[0, 1]]


def test_only_temperature():
    law = process(LOGITS.double(), P(temperature=0.7))
    assert torch.equal(law, ((LOGITS.double() - 2) / 0.7).softmax(-1))


def test_top_p_counts_mass_within_top_k():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).double().log()
    assert kept(process(logits, P(temperature=1.0, top_p=0.55))) == [[0, 1]]
    # Within the top two the first token has 4/7 = .571 of the mass, which is enough.
    assert kept(process(logits, P(temperature=1.0, top_k=2, top_p=0.55))) == [[0]]


def test_min_p_is_relative_to_the_most_likely_token():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).double().log()
    assert kept(process(logits, P(temperature=1.0, min_p=0.25))) == [[0, 1, 2]]
    assert kept(process(logits, P(temperature=1.0, min_p=1.0))) == [[0]]


@pytest.mark.parametrize("params", [P(temperature=1.0, top_k=2), P(temperature=1.0, top_p=0.4)])
def test_ties_go_to_the_lowest_ids(params):
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0]])
    assert kept(process(logits, params)) == [[0, 1]]
    assert best(logits) == [0]
    assert kept(process(logits, P())) == [[0]]


def test_filters_match_a_plain_sort(seeded):
    logits = torch.randn(4, 300).round(decimals=1)  # many ties
    for k, p in ((7, 1.0), (0, 0.8), (40, 0.6)):
        law = process(logits, P(temperature=0.9, top_k=k, top_p=p))
        for row, out in zip(logits, law, strict=True):
            order = sorted(range(300), key=lambda i: (-float(row[i]), i))[: k or 300]
            probs = (row[order].double() / 0.9).softmax(-1)
            want = [
                i
                for i, before in zip(order, (probs.cumsum(-1) - probs).tolist(), strict=True)
                if before < p - 1e-7
            ]
            assert sorted(want) == out.nonzero()[:, 0].tolist()
            assert abs(float(out.sum()) - 1) < 1e-5


def test_rows_do_not_depend_on_each_other(seeded):
    logits = torch.randn(5, 3000)
    params = P(temperature=0.8, top_k=500, top_p=0.9, min_p=0.01, repetition_penalty=1.2)
    together = process(logits, params, [1, 2], [[], [3], [3, 4], [5], [5, 5]], [9])
    for i, path in enumerate([[], [3], [3, 4], [5], [5, 5]]):
        assert torch.equal(together[i], process(logits[i : i + 1], params, [1, 2], [path], [9])[0])


def test_penalties_count_the_rows_own_path_as_if_it_were_committed(seeded):
    logits = torch.randn(3, 20).double()
    params = P(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25)
    paths = [[], [4], [4, 4]]
    got = scores(logits, params, [1, 4, 4], paths, [2, 3])
    for row, path, out in zip(logits, paths, got, strict=True):
        want = row.clone()
        output = [1, 4, 4, *path]
        for i in {2, 3, *output}:
            want[i] = want[i] / 1.5 if want[i] > 0 else want[i] * 1.5
        for i in set(output):
            want[i] -= 0.25 * output.count(i) + 0.5
        torch.testing.assert_close(out, want, rtol=0, atol=1e-15)
    committed = scores(logits[2:], params, [1, 4, 4, 4, 4], None, [2, 3])
    assert torch.equal(committed[0], got[2])


def test_mask_comes_first_and_its_own_row_only():
    logits = torch.tensor([[5.0, 4.0, 3.0], [5.0, 4.0, 3.0]])
    ban0 = torch.tensor([False, True, True])
    law = process(logits, P(temperature=1.0, top_k=1), masks=[ban0, None])
    assert kept(law) == [[1], [0]]
    assert best(scores(logits, P(), masks=[ban0, None])) == [1, 0]
    assert logits.tolist() == [[5.0, 4.0, 3.0]] * 2  # not written to


def test_a_mask_that_allows_nothing_is_refused():
    nothing = torch.zeros(3, dtype=torch.bool)
    for params in (P(), P(temperature=1.0, top_p=0.5)):
        with pytest.raises(MaskError, match="allows no token"):
            process(LOGITS, params, masks=[nothing])
    with pytest.raises(MaskError, match="does not fit"):
        process(LOGITS, P(), masks=[torch.ones(4, dtype=torch.bool)])
    with pytest.raises(MaskError, match="2 masks were given for 1 rows"):
        process(LOGITS, P(), masks=[torch.ones(3, dtype=torch.bool), None])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(bad):
    logits = torch.tensor([[0.0, bad, 1.0]])
    for params in (P(), P(temperature=1.0)):
        with pytest.raises(RequestError, match="not finite"):
            process(logits, params)
    with pytest.raises(RequestError, match="not finite"):
        best(logits)


def test_logprobs_are_the_models_own():
    logits = torch.tensor([[0.1, 0.5, 0.2, 0.2]], dtype=torch.float64).log()
    ((value, top),) = logprobs(logits, [3], 3)
    assert abs(value - math.log(0.2)) < 1e-12
    assert [i for i, _ in top] == [1, 2, 3]  # most likely first, ties by id
    assert abs(top[0][1] - math.log(0.5)) < 1e-12
    assert logprobs(logits, [0]) == [(pytest.approx(math.log(0.1)), ())]
    assert len(logprobs(logits, [0], 99)[0][1]) == 4


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 1000, 2048])
def test_the_first_maximum_is_torchs_whatever_the_vocabulary(vocab: int) -> None:
    draw = torch.Generator().manual_seed(vocab)
    x = torch.randint(-3, 4, (64, vocab), generator=draw).float()  # ties everywhere
    x[0] = float("-inf")
    peak, index = first_max(x)
    assert torch.equal(index, x.argmax(-1))
    assert torch.equal(peak, x.max(-1).values)
    x[3, vocab // 2] = float("nan")
    assert first_max(x)[0][3].isnan()
