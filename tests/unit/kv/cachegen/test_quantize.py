"""Levels, and rows to symbols: bounds of the error, anchors, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from workbench.kv.cachegen.levels import ANCHORS, DELTA_LEVELS, GROUP, LEVELS, Alphabet, Level, alphabets
from workbench.kv.cachegen.quantize import decode_rows, encode_rows, from_parts, is_anchor, sizes
from workbench.spec.errors import OptionError, UnsupportedInput


def rows(tokens: int = 37, channels: int = 24, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, channels, generator=gen) * torch.logspace(-1, 1, channels) + 0.3


def step(symbols, alphabet) -> torch.Tensor:
    return symbols.scale.float()[:, None] / alphabet.half


@pytest.mark.parametrize("bins", [8, 12, 16, 32, 64, 256])
def test_a_row_is_off_by_at_most_half_a_step(bins):
    x, alphabet = rows(), Alphabet("rows", bins)
    symbols = encode_rows(x, alphabet)
    assert int(symbols.codes.max()) == 2 * alphabet.half and len(symbols.codes.unique()) <= alphabet.symbols
    # half a step, and the rounding of the scale to float16 at the largest element
    bound = step(symbols, alphabet) * 0.5 + symbols.scale.float()[:, None] * 2**-11
    assert bool(((decode_rows(symbols, alphabet) - x).abs() <= bound * 1.0001).all())


@pytest.mark.parametrize("tokens", [1, 9, 10, 11, 37])
def test_differences_are_to_the_decoded_anchor(tokens):
    x, alphabet = rows(tokens) * 3, Alphabet("deltas", 64)
    symbols = encode_rows(x, alphabet)
    back, anchor = decode_rows(symbols, alphabet), is_anchor(tokens)
    assert int(anchor.sum()) == -(-tokens // GROUP)
    fine = step(symbols, ANCHORS)[anchor] * 0.5 + symbols.scale[anchor].float()[:, None] * 2**-11
    assert bool(((back - x).abs()[anchor] <= fine * 1.0001).all())
    # with differences to the exact anchor, the anchor's error would come on top of half a step
    half = step(symbols, alphabet)[~anchor] * 0.5 + symbols.scale[~anchor].float()[:, None] * 2**-11
    assert bool(((back - x).abs()[~anchor] <= half * 1.001 + 1e-6).all())


def test_differences_to_undecoded_anchors_would_drift():
    x, alphabet = rows(20).repeat_interleave(GROUP, 0) + 0.1 * rows(200, seed=1), Alphabet("deltas", 200)
    good = (decode_rows(encode_rows(x, alphabet), alphabet) - x)[~is_anchor(200)].pow(2).mean()
    anchors = x[::GROUP].repeat_interleave(GROUP, 0)
    deltas = encode_rows(x - anchors, Alphabet("rows", 200))
    coded = encode_rows(x[::GROUP], ANCHORS)
    decoded = decode_rows(coded, ANCHORS).repeat_interleave(GROUP, 0)
    drifted = decode_rows(deltas, Alphabet("rows", 200)) + decoded
    assert (drifted - x)[~is_anchor(200)].pow(2).mean() > 3 * good


@pytest.mark.parametrize("of", ["rows", "deltas"])
@pytest.mark.parametrize("tokens", [1, 10, 23])
def test_parts_are_taken_apart_and_put_together(of, tokens):
    alphabet = Alphabet(of, 16)
    symbols = encode_rows(rows(tokens), alphabet)
    parts = symbols.parts(alphabet)
    assert [(a, len(codes)) for a, codes in parts] == sizes(alphabet, tokens)
    again = from_parts(alphabet, [codes for _, codes in parts], symbols.scale)
    assert torch.equal(again.codes, symbols.codes)


def test_a_row_of_zeros_and_a_tiny_row_come_back_finite():
    x = torch.stack([torch.zeros(8), torch.full((8,), 1e-9), torch.linspace(-1e-6, 1e-6, 8)])
    back = decode_rows(encode_rows(x, Alphabet("rows", 32)), Alphabet("rows", 32))
    assert torch.equal(back[0], x[0]) and bool(torch.isfinite(back).all()) and back.abs().max() < 2e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e6])
def test_what_has_no_scale_is_refused(bad):
    x = rows(5)
    x[3, 2] = bad
    with pytest.raises(UnsupportedInput, match="float16"):
        encode_rows(x, Alphabet("rows", 32))


@pytest.mark.parametrize("bins", [2, 3, 31, 258])
def test_odd_numbers_of_bins_are_refused(bins):
    with pytest.raises(OptionError, match="bins"):
        Level("x", (32, bins, 16), (32, 16, 16))
    with pytest.raises(OptionError, match="thirds"):
        Level("x", (32, 16), (32, 16, 16))  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 30])
def test_kvc_13_thirds_follow_the_number_of_layers(layers):
    level = Level("x", (64, 32, 16), (32, 16, 8))
    bins = [level.alphabet("k", i, layers).bins for i in range(layers)]
    assert bins == sorted(bins, reverse=True) and bins[0] == 64
    counts = [bins.count(b) for b in (64, 32, 16)]
    assert sum(counts) == layers and max(counts) - min(counts) <= 1
    assert len(list(level.tables(layers))) == 2 * layers


def test_the_shipped_levels_are_ordered_and_know_their_alphabets():
    assert len(LEVELS) >= 3
    for finer, coarser in itertools.pairwise(LEVELS):
        assert all(a >= b for a, b in zip(finer.k + finer.v, coarser.k + coarser.v, strict=True))
    assert ANCHORS not in alphabets(LEVELS) and ANCHORS in alphabets(DELTA_LEVELS)
    needed = {a for n in LEVELS + DELTA_LEVELS for a, _, _ in n.tables(30)}
    assert needed == set(alphabets(LEVELS + DELTA_LEVELS))
