"""Sampling against the engine's own: the same laws, the same noise, the same tokens; refusals and errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from workbench.engine.noise import Key, Stream, uniforms
from workbench.engine.noise import sample as engine_sample
from workbench.engine.params import SamplingParams
from workbench.engine.processing import process
from workbench.kernels.decode.sample import Filters, Noise, draw, law, pack_mask, reference, sample
from workbench.spec.errors import MaskError, RequestError, UnsupportedInput

pytestmark = pytest.mark.usefixtures("poisoned")

SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_k=20),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.8, top_k=50, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1e-30, top_p=0.9),
    SamplingParams(temperature=2.0, top_k=1),
]


def filters(settings: list[SamplingParams], device: str) -> Filters:
    return Filters.rows(
        [s.temperature for s in settings],
        [s.top_k for s in settings],
        [s.top_p for s in settings],
        [s.min_p for s in settings],
        device,
    )


def noise(rows: int, generator: torch.Generator, device: str) -> tuple[Noise, list[Key]]:
    seeds = [int(n) for n in torch.randint(0, 2**62, (rows,), generator=generator)]
    seeds[0] = 2**64 - 1
    keys = [Key(seed, i % 3, 1000 * i + 2**33) for i, seed in enumerate(seeds)]
    return Noise.rows(
        [k.seed for k in keys], [k.sample for k in keys], [k.position for k in keys], device
    ), keys


def engine_laws(logits: Tensor, settings: list[SamplingParams], mask: Tensor | None = None) -> Tensor:
    masks = [None] * len(logits) if mask is None else list(mask)
    return torch.cat(
        [process(x[None], s, masks=[m]) for x, s, m in zip(logits, settings, masks, strict=True)]
    )


@pytest.mark.parametrize("vocabulary", [5, 300, 2100])
def test_laws_and_tokens_are_the_engines(vocabulary: int, generator: torch.Generator, device: str) -> None:
    """Logits are rounded to one decimal, so that every filter has ties to break."""
    rows = len(SETTINGS)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 3).round(decimals=1)
    mask = torch.rand(rows, vocabulary, generator=generator) < 0.7
    mask[:, 1] = True
    mine, keys = noise(rows, generator, device)
    for allowed in (None, mask):
        expected = engine_laws(logits, SETTINGS, allowed)
        packed = None if allowed is None else pack_mask(allowed).to(device)
        token, found = sample(logits.to(device), filters(SETTINGS, device), mine, packed)
        assert torch.equal(found.cpu() > 0, expected > 0)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)
        assert token.tolist() == [engine_sample(p, k) for p, k in zip(expected, keys, strict=True)]


def test_the_definition_agrees_on_the_engines_laws(generator: torch.Generator) -> None:
    logits = torch.randn(len(SETTINGS), 200, generator=generator) * 3
    torch.testing.assert_close(
        reference(logits, filters(SETTINGS, "cpu")).float(),
        engine_laws(logits, SETTINGS),
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_and_strided_rows(dtype: torch.dtype, generator: torch.Generator, device: str) -> None:
    whole = (torch.randn(4, 3, 128, generator=generator) * 2).to(dtype)
    logits = whole[:, 1]
    settings = [SETTINGS[5]] * 4
    found = law(logits.to(device), filters(settings, device))
    expected = engine_laws(logits.float(), settings)
    assert torch.equal(found.cpu() > 0, expected > 0)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-7)


def test_noise_is_the_engines_bit_for_bit(device: str) -> None:
    """Laws of a single token reveal nothing, so pairs are used: who wins says which noise is smaller."""
    key = Key(2**63 + 5, 7, 12345678901, int(Stream.DRAFT))
    race = -np.log(np.maximum(uniforms(key, 64), 2.0**-54))
    mine = Noise.rows([key.seed] * 63, [key.sample] * 63, [key.position] * 63, device)
    pairs = torch.zeros(63, 64)
    pairs[range(63), range(63)] = 1.0
    pairs[range(63), range(1, 64)] = 1.0
    won = draw(pairs.to(device), mine, stream=int(Stream.DRAFT)).tolist()
    assert won == [i if race[i] <= race[i + 1] else i + 1 for i in range(63)]


def test_draws_follow_the_law(device: str) -> None:
    """Chi-square at 0.1 % over 240 positions; a shifted law must fail it."""
    p = torch.tensor([0.5, 0.25, 0.125, 0.0, 0.125])
    n = 240
    mine = Noise.rows([3] * n, [0] * n, list(range(n)), device)
    counts = torch.bincount(draw(p.expand(n, -1).contiguous().to(device), mine).cpu(), minlength=5).numpy()
    assert counts[3] == 0
    seen = [0, 1, 2, 4]
    assert chisquare(counts[seen], n * p.numpy()[seen]).pvalue > 1e-3
    wrong = np.array([0.125, 0.375, 0.375, 0.125])
    assert chisquare(counts[seen], n * wrong).pvalue < 1e-6


def test_a_law_of_zeros_draws_nothing(device: str) -> None:
    mine = Noise.rows([1], [0], [0], device)
    assert draw(torch.zeros(1, 40, device=device), mine).tolist() == [-1]


def test_masks_that_allow_nothing_and_broken_logits_are_errors(device: str) -> None:
    one = filters([SamplingParams(temperature=1.0)] * 2, device)
    logits = torch.zeros(2, 40, device=device)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1] = False
    packed = pack_mask(mask).to(device)
    with pytest.raises(MaskError, match="row 1"):
        law(logits, one, packed)
    assert float(law(logits, one, packed, check=False)[1].sum()) == 0
    for broken in (math.nan, math.inf):
        logits[0, 3] = broken
        with pytest.raises(RequestError, match="row 0"):
            law(logits, one)


def test_misfits_are_refused(device: str) -> None:
    one = filters([SamplingParams(temperature=1.0)] * 2, device)
    logits = torch.zeros(2, 40, device=device)
    mine = Noise.rows([1, 2], [0, 0], [0, 1], device)
    for bad in (
        lambda: law(logits.double(), one),
        lambda: law(logits[:1], one),
        lambda: law(torch.zeros(40, 2, device=device).T, one),
        lambda: law(logits, one, torch.ones(2, 40, dtype=torch.bool, device=device)),
        lambda: law(logits, one, torch.ones(2, 1, dtype=torch.int32, device=device)),
        lambda: draw(logits.half(), mine),
        lambda: draw(logits[:1], mine),
    ):
        with pytest.raises(UnsupportedInput):
            bad()
    assert draw(logits[:0], Noise.rows([], [], [], device)).shape == (0,)


def test_masks_pack_to_words() -> None:
    allowed = torch.zeros(1, 70, dtype=torch.bool)
    allowed[0, [0, 31, 32, 69]] = True
    assert pack_mask(allowed).tolist() == [[1 - 2**31, 1, 32]]
