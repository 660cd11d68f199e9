"""CacheGen on random rows, levels and links."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.kv.cachegen import ranges
from workbench.kv.cachegen.levels import Alphabet
from workbench.kv.cachegen.link import BandwidthTrace
from workbench.kv.cachegen.policy import TEXT, Adaptive, Fixed, Offer
from workbench.kv.cachegen.quantize import decode_rows, encode_rows, from_parts
from workbench.kv.cachegen.tables import TOTAL, integers
from workbench.kv.cachegen.transfer import simulate

SIZES = st.integers(0, 10**7)
SECONDS = st.floats(0, 2)
OFFERS = st.lists(
    st.builds(
        lambda sizes, decode, text, compute: Offer(
            tuple(sorted(sizes, reverse=True)), tuple(decode), text, compute
        ),
        st.lists(SIZES, min_size=3, max_size=3),
        st.lists(SECONDS, min_size=3, max_size=3),
        st.integers(0, 5000),
        SECONDS,
    ),
    min_size=1,
    max_size=12,
)
TRACES = st.builds(
    lambda gaps, rates, last: BandwidthTrace(
        tuple(np.cumsum([0.0, *gaps]).tolist()), (*rates[: len(gaps)], last)
    ),
    st.lists(st.floats(0.01, 3), max_size=6),
    st.lists(st.one_of(st.just(0.0), st.floats(1e3, 1e8)), min_size=6, max_size=6),
    st.floats(1e4, 1e8),
)


@given(
    st.integers(1, 45),
    st.integers(1, 9),
    st.sampled_from(["rows", "deltas"]),
    st.sampled_from([4, 8, 12, 16, 32, 64, 256]),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**32 - 1),
)
def test_any_rows_survive_any_tables(tokens, channels, of, bins, size, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, channels, generator=gen) * size
    alphabet, rng = Alphabet(of, bins), np.random.default_rng(seed)
    symbols = encode_rows(x, alphabet)
    parts = [
        (codes, integers(rng.random((channels, a.symbols)) ** 8 + 1e-12))
        for a, codes in symbols.parts(alphabet)
    ]
    data = ranges.encode(parts)
    found = ranges.decode(data, [(len(codes), table) for codes, table in parts])
    again = decode_rows(from_parts(alphabet, found, symbols.scale), alphabet)
    assert torch.equal(again, decode_rows(symbols, alphabet))
    assert 8 * len(data) <= 1.01 * ranges.ideal_bits(parts) + 96  # the coder ends on whole words
    worst = x.abs().amax(1) / alphabet.half if of == "rows" else 2 * x.abs().max() / alphabet.half
    assert bool(((again - x).abs().amax(1) <= worst).all())


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=255), st.floats(1e-9, 1))
def test_frequencies_always_add_up(weights, floor):
    found = integers(np.array(weights)[None] + floor)
    assert int(found.astype(np.int64).sum()) == TOTAL and int(found.min()) >= 1


@given(TRACES, st.floats(0, 20), SIZES, SIZES)
def test_links_are_monotone_and_additive(trace, begin, a, b):
    first = trace.finish(begin, a)
    assert first >= begin
    both = trace.finish(begin, a + b)
    assert both >= first - 1e-9
    assert abs(trace.finish(first, b) - both) <= 1e-6 * max(1.0, both)


@given(OFFERS, TRACES, st.sampled_from(["fallback", "first", "never"]), st.floats(0.1, 20))
def test_a_transfer_keeps_its_books(offers, trace, text, slo):
    run = simulate(offers, trace, Adaptive(text=text), slo)
    busy = now = 0.0
    for offer, sent in zip(offers, run.sent, strict=True):
        nbytes, work = offer.cost(sent.choice)
        assert sent.nbytes == nbytes and sent.begin == now <= sent.arrived
        assert abs(sent.ready - max(busy, sent.arrived) - work) < 1e-9
        busy, now = sent.ready, sent.arrived
    assert run.seconds == busy and run.late == (busy > slo)
    assert (TEXT in run.choices) <= (text != "never")


@given(OFFERS, st.floats(1e4, 1e8), st.floats(0.1, 20))
def test_on_a_steady_link_adapting_is_late_only_if_it_must_be(offers, rate, slo):
    """The estimate is right from the second chunk on; the first is sent blind, at the coarsest level here."""
    trace = BandwidthTrace.steady(rate)
    run = simulate(offers, trace, Adaptive(start=2, text="never"), slo)
    if not simulate(offers, trace, Fixed(2), slo).late and offers[0].sizes[2]:
        assert run.seconds <= slo * (1 + 1e-9)
