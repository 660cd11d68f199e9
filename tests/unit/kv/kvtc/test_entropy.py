"""Symbols to bytes: exact both ways, as short as promised, refused when damaged."""

from __future__ import annotations

import sys
import zlib

import pytest
import torch

from workbench.kv.kvtc import ranges
from workbench.kv.kvtc.codes import Coder, join
from workbench.kv.kvtc.deflate import deflate, inflate, packed, packed_sizes, unpacked
from workbench.kv.kvtc.formats import KINDS, dequantize, quantize
from workbench.kv.kvtc.plan import BitPlan, Group
from workbench.spec.errors import MissingExtra, PayloadError

PLAN = BitPlan(
    (
        Group(0, 1, "int2"),
        Group(1, 16, "fp8"),
        Group(17, 64, "int4"),
        Group(90, 16, "int4"),
        Group(106, 64, "int2"),
    ),
    0.0,
    9999,
)
CODER = Coder(PLAN)


def coefficients(tokens: int = 320, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, PLAN.rank, generator=gen) * torch.logspace(1, -1.5, PLAN.rank)


def same(a, b):
    return (
        torch.equal(a.shift.view(torch.int16), b.shift.contiguous().view(torch.int16))
        and torch.equal(a.scale.view(torch.int16), b.scale.contiguous().view(torch.int16))
        and all(torch.equal(a.symbols[k], b.symbols[k]) for k in KINDS)
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 16, 64])
def test_a_groups_error_is_bounded_by_its_own_scale(kind, size):
    x = torch.randn(50, size) * torch.logspace(-3, 3, 50)[:, None]
    codes, shift, scale = quantize(x, kind)
    assert shift.dtype == scale.dtype == torch.float16 and shift.shape == (50, 1)
    error = (dequantize(codes, shift, scale, kind) - x).abs()
    bounds = {"fp8": (x - shift.float()).abs() / 16 + scale.float() * 2**-9}
    bound = bounds.get(kind, scale.float() / 2)
    assert bool((error <= bound * 1.001 + 1e-7).all())


def test_dropped_components_decode_to_zero_and_kept_ones_do_not():
    x = coefficients()
    back = CODER.decode(CODER.encode(x))
    assert not back[:, 81:90].any() and bool(back[:, :81].any(0).all())
    assert float((back - x)[:, :81].square().sum() / x[:, :81].square().sum()) < 0.01


def test_codes_of_chunks_are_the_codes_of_the_whole():
    x = coefficients()
    assert same(join([CODER.encode(part) for part in x.split(16)]), CODER.encode(x))


@pytest.mark.parametrize("tokens", [1, 5, 16, 320])
def test_packing_is_exact_both_ways(tokens):
    codes = CODER.encode(coefficients(tokens))
    streams = packed(codes)
    assert {n: len(d) for n, d in streams.items()} == packed_sizes(CODER, tokens)
    assert same(unpacked(CODER, tokens, streams), codes)
    if tokens % 8 == 0:
        assert 8 * sum(map(len, streams.values())) == tokens * PLAN.bits


@pytest.mark.parametrize("tokens", [1, 2, 16, 320])
def test_range_coding_is_exact_both_ways_and_within_one_percent_of_its_models(tokens):
    codes = CODER.encode(coefficients(tokens))
    data = ranges.encode(codes, CODER)
    assert same(ranges.decode(data, CODER, tokens), codes)
    ideal = ranges.ideal_bits(codes, CODER) / 8
    assert ideal <= len(data) <= 1.01 * ideal + 8


def test_range_coding_is_smaller_than_deflate_and_deflate_than_packing():
    codes = CODER.encode(coefficients(640))
    plain = packed(codes)
    small = sum(len(deflate(d)) for d in plain.values())
    assert len(ranges.encode(codes, CODER)) < 0.95 * small < 0.95 * sum(map(len, plain.values()))


def test_inflating_takes_exactly_what_was_promised():
    data = deflate(b"abc" * 100)
    assert inflate(data, 300, "x") == b"abc" * 100
    for bad, size in ((data, 299), (data, 301), (data[:-1], 300), (data + b"x", 300), (b"\xff\xff", 300)):
        with pytest.raises(PayloadError, match="'x'"):
            inflate(bad, size, "x")
    bomb = zlib.compress(bytes(10_000_000))[2:-4]
    with pytest.raises(PayloadError):
        inflate(bomb, 100, "x")


def test_streams_of_another_length_are_refused():
    streams = packed(CODER.encode(coefficients(16)))
    with pytest.raises(PayloadError, match="'int4'"):
        unpacked(CODER, 16, {**streams, "int4": streams["int4"][:-1]})
    del streams["scale"]
    with pytest.raises(PayloadError, match="'scale'"):
        unpacked(CODER, 16, streams)
    with pytest.raises(PayloadError, match="32-bit"):
        ranges.decode(b"abc", CODER, 16)


def test_a_damaged_range_stream_never_escapes_as_another_error():
    codes = CODER.encode(coefficients(32))
    data = ranges.encode(codes, CODER)
    gen, other = torch.Generator().manual_seed(0), 0
    for bit in torch.randint(0, 8 * len(data), (30,), generator=gen).tolist():
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        try:
            found = packed(ranges.decode(bytes(bad), CODER, 32))
        except PayloadError:
            other += 1
            continue
        assert {n: len(d) for n, d in found.items()} == packed_sizes(CODER, 32)
        other += found != packed(codes)
    assert other == 30  # refused, or other codes of the same shape


def test_without_constriction_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "constriction", None)
    with pytest.raises(MissingExtra, match="constriction"):
        ranges.encode(CODER.encode(coefficients(16)), CODER)


def test_a_plan_without_groups_codes_nothing():
    coder = Coder(BitPlan((), 0.0, 0))
    codes = coder.encode(torch.zeros(16, 0))
    assert coder.decode(codes).shape == (16, 0)
    assert ranges.encode(codes, coder) == b"" and ranges.decode(b"", coder, 16).tokens == 16
