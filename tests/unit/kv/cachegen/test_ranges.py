"""Probability tables and the coder: exact, close to the entropy, and never fooled by damaged bytes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from workbench.kv.cachegen import ranges
from workbench.kv.cachegen.levels import Alphabet
from workbench.kv.cachegen.tables import TOTAL, SymbolCounts, integers, pooled
from workbench.spec.errors import MissingExtra, PayloadError


def skewed(tokens: int, channels: int, symbols: int, seed: int = 0) -> torch.Tensor:
    """Every channel has a centre and a width of its own."""
    gen = np.random.default_rng(seed)
    centre, width = np.linspace(2, symbols - 3, channels), np.linspace(0.3, 4, channels)
    x = gen.normal(centre, width, (tokens, channels)).round().clip(0, symbols - 1)
    return torch.from_numpy(x.astype(np.uint8))


def table(alphabet: Alphabet, channels: int) -> np.ndarray:
    counts = SymbolCounts(alphabet, 1, channels)
    counts.add("k", 0, skewed(3000, channels, alphabet.symbols, seed=1))
    return counts.frequencies()


def test_frequencies_leave_no_symbol_out_and_add_up():
    alphabet = Alphabet("rows", 32)
    found = table(alphabet, 12)
    assert found.dtype == np.uint16 and found.min() >= 1
    assert (found.astype(np.int64).sum(-1) == TOTAL).all()
    unseen = found[1, 0]  # the values' side was given nothing: all symbols alike
    assert int(unseen.max()) - int(unseen.min()) <= alphabet.symbols
    sure = np.zeros((1, 255))
    sure[0, 7] = 1
    assert integers(sure)[0, 7] == TOTAL - 254


def test_a_sparse_channel_leans_on_its_layer():
    counts = SymbolCounts(Alphabet("rows", 16), 1, 2)
    counts.counts[0, 0, 0, 3] = 100_000
    counts.counts[0, 0, 1, 7] = 1
    other = counts.frequencies()[0, 0, 1]
    assert other[3] > 20 * other[5]


@pytest.mark.parametrize("bins", [8, 32, 64])
def test_what_was_coded_is_decoded_close_to_the_entropy(bins):
    alphabet = Alphabet("rows", bins)
    frequencies = table(alphabet, 12)[0, 0]
    codes = skewed(2000, 12, alphabet.symbols)
    data = ranges.encode([(codes, frequencies)])
    (back,) = ranges.decode(data, [(len(codes), frequencies)])
    assert torch.equal(back, codes)
    ideal = ranges.ideal_bits([(codes, frequencies)])
    assert ideal <= 8 * len(data) <= 1.01 * ideal
    unlike = skewed(500, 12, alphabet.symbols, seed=9).flip(1)  # rare symbols cost, but can be coded
    data = ranges.encode([(unlike, frequencies)])
    assert torch.equal(ranges.decode(data, [(500, frequencies)])[0], unlike)


def test_the_entropy_of_known_laws():
    codes = torch.tensor([[0], [1], [2], [2]], dtype=torch.uint8)
    law = integers(np.array([[1.0, 1.0, 2.0]]))
    assert ranges.ideal_bits([(codes, law)]) == pytest.approx(2 + 2 + 1 + 1, abs=1e-3)


def test_anchors_and_differences_share_a_stream():
    a, b = Alphabet("rows", 256), Alphabet("deltas", 16)
    parts = [(skewed(11, 6, a.symbols), table(a, 6)[0, 0]), (skewed(90, 6, b.symbols), table(b, 6)[0, 0])]
    data = ranges.encode(parts)
    back = ranges.decode(data, [(len(codes), f) for codes, f in parts])
    assert all(torch.equal(x, codes) for x, (codes, _) in zip(back, parts, strict=True))
    empty = [(parts[0][0][:1], parts[0][1]), (parts[1][0][:0], parts[1][1])]
    found = ranges.decode(ranges.encode(empty), [(1, parts[0][1]), (0, parts[1][1])])
    assert [x.shape for x in found] == [(1, 6), (0, 6)] and torch.equal(found[0], empty[0][0])


def test_channels_of_their_own_are_smaller_than_one_table_for_all():
    alphabet = Alphabet("rows", 32)
    counts = SymbolCounts(alphabet, 2, 12)
    for layer in range(2):
        for side in ("k", "v"):
            counts.add(side, layer, skewed(3000, 12, alphabet.symbols, seed=layer))
    own = counts.frequencies()
    one = pooled(own)
    assert one.shape == own.shape and len(np.unique(one[0].reshape(-1, alphabet.symbols), axis=0)) == 1
    assert np.allclose(one[0, 0, 0] / TOTAL, own[0].astype(float).mean((0, 1)) / TOTAL, atol=1e-3)
    codes = skewed(500, 12, alphabet.symbols, seed=5)
    assert ranges.ideal_bits([(codes, own[0, 0])]) < 0.92 * ranges.ideal_bits([(codes, one[0, 0])])


def test_damaged_streams_are_refused_or_decode_to_something():
    """The container's checksums catch damage; without them the coder must still end, and in a typed way."""
    alphabet = Alphabet("rows", 16)
    frequencies = table(alphabet, 6)[0, 0]
    codes = skewed(300, 6, alphabet.symbols)
    data = ranges.encode([(codes, frequencies)])
    with pytest.raises(PayloadError, match="32-bit"):
        ranges.decode(data[:-1], [(300, frequencies)])
    with pytest.raises(PayloadError, match="longer"):
        ranges.decode(data, [(20, frequencies)])
    refused = 0
    for bit in range(0, 8 * len(data), 37):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            (found,) = ranges.decode(bytes(bad), [(300, frequencies)])
            assert int(found.max()) < alphabet.symbols
        except PayloadError:
            refused += 1
    assert refused


def test_without_the_coder_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(MissingExtra, match="constriction") as err:
        ranges.encode([(torch.zeros(1, 1, dtype=torch.uint8), integers(np.ones((1, 7))))])
    assert "codec" in err.value.hint
