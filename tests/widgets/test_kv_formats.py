"""Rows of a cache and what formats do to them: numbers against their definitions, on the shipped model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from workbench.core.quality_windows import QualitySettings
from workbench.core.session import Session
from workbench.kv.cached import CachedRows, Reconstructed
from workbench.spec.errors import OptionError
from workbench.widgets.kv_views import compare_formats, keep_exact, measure_points, read_cache, round_trips
from workbench.widgets.kv_views.cache_rows import CachePicture
from workbench.widgets.kv_views.format_error import sqnr_db


@pytest.fixture(scope="module")
def tiny() -> Iterator[Any]:
    with Session("tiny", dtype="float32") as session:
        yield session


@pytest.fixture(scope="module")
def cache(tiny: Any) -> Any:
    return read_cache(tiny, 160)


def test_rows_are_those_the_engine_caches(tiny: Any, cache: Any) -> None:
    ids = tiny.tokenizer.encode("".join(cache.words))
    assert len(cache.words) == cache.rows.tokens == 160
    assert len(cache.rows.k) == 5 and cache.rows.k[0].shape == (160, 2, 64)
    again = read_cache(tiny, 8, ids=ids[:8])
    for a, b in zip(again.rows.k, cache.rows.k, strict=True):
        torch.testing.assert_close(a, b[:8], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_of_the_head_whose_key_channels_differ_most(cache: Any, theme: Any) -> None:
    figure = json.loads(cache.figure(theme=theme).to_json())
    layer, head = cache.where(None, None)
    assert f"layer {layer}, KV head {head}" in figure["layout"]["title"]["text"]
    k, v = cache.head(layer, head)
    drawn = [torch.tensor(t["z"]) for t in figure["data"]]
    for x, z in zip((k, v), drawn, strict=True):
        torch.testing.assert_close(z, x[:160].abs(), rtol=0, atol=6e-4)
    assert cache.loudest(layer, head, 0) >= cache.loudest(0, 0, 0)
    assert len(cache.table()) == 5 and "measured" in cache.table().to_text()


def test_a_picture_of_a_part_says_so(cache: Any) -> None:
    k, v = (tuple(x.repeat(2, 1, 1) for x in side) for side in (cache.rows.k, cache.rows.v))
    figure = CachePicture("m", CachedRows(k, v, torch.arange(320)), ()).figure()
    assert figure.layout.yaxis.title.text == "token, the first 160 of 320" and len(figure.data[0].z) == 160
    assert cache.figure().layout.yaxis.title.text == "token"


def test_heads_and_lengths_that_are_not_there_are_refused(tiny: Any, cache: Any) -> None:
    with pytest.raises(OptionError, match="5 layers of 2 KV heads"):
        cache.figure(5, 0)
    for tokens in (4, 10**6):
        with pytest.raises(OptionError):
            read_cache(tiny, tokens)


def test_errors_and_bits_follow_from_what_comes_back(tiny: Any, cache: Any) -> None:
    formats = ("kv_int8", "kv_fp4", "kivi:bits=4,residual=64")
    errors = compare_formats(tiny, formats, cache.rows)
    assert errors.bits["kv_fp4"] == pytest.approx(4.5)
    assert errors.bits["kv_int8"] == pytest.approx(8.25)
    assert errors.bits["kivi:bits=4,residual=64"] == pytest.approx(5.0)  # of the 128 tokens in full pages
    back = round_trips(tiny, formats, 160)["kv_fp4"](cache.rows)
    x, y = cache.rows.v[2][4:].double(), back.rows.v[2][4:].double()
    expected = 10 * torch.log10(x.square().sum() / (x - y).square().sum())
    assert errors.sqnr["kv_fp4"][1][2] == pytest.approx(float(expected))
    assert errors.sqnr["kv_int8"][0][0] > errors.sqnr["kv_fp4"][0][0] > 15
    assert len(json.loads(errors.figure("dark").to_json())["data"]) == 2 * len(formats)
    assert len(errors.table()) == len(formats)


def test_an_exact_format_draws_a_gap_and_says_so(cache: Any) -> None:
    assert sqnr_db(cache.rows.k[0], cache.rows.k[0], 160) == float("inf")


def test_nothing_to_compare_or_nothing_coded_is_refused(tiny: Any, cache: Any) -> None:
    with pytest.raises(OptionError, match="no format"):
        compare_formats(tiny, (), cache.rows)
    short = CachedRows(
        tuple(k[:60] for k in cache.rows.k), tuple(v[:60] for v in cache.rows.v), cache.rows.positions[:60]
    )
    with pytest.raises(OptionError, match="codes none of 60"):
        compare_formats(tiny, ("kivi",), short)


def test_rows_kept_exact_are_exact_and_paid_for(tiny: Any, cache: Any) -> None:
    trip = round_trips(tiny, ("kv_fp4",), 160)["kv_fp4"]
    plain, kept = trip(cache.rows), keep_exact(trip, 4)(cache.rows)
    for a, b, exact in zip(kept.rows.k, plain.rows.k, cache.rows.k, strict=True):
        assert torch.equal(a[:4], exact[:4]) and torch.equal(a[4:], b[4:])
    token = cache.rows.nbytes_16bit() // 160
    assert kept.exempt == 4
    assert kept.payload - plain.payload == round(4 * token * (1 - 4.5 / 16))
    coded = Reconstructed(cache.rows, cache.rows.nbytes_16bit(), 160)
    assert keep_exact(lambda rows: coded, 4)(cache.rows).payload == coded.payload  # it was exact already


def test_points_are_measured_by_name_and_by_function(tiny: Any) -> None:
    settings = QualitySettings(context=128, score=16, windows=1, greedy=0)
    trip = round_trips(tiny, ("kv_fp4",), 128)["kv_fp4"]
    methods = {"kv_fp4": "kv_fp4", "same": trip, "none, exact": lambda rows: Reconstructed(rows, 1, 128)}
    named, same, exact = measure_points(tiny, methods, settings)
    assert (named.technique, exact.technique) == ("kv_fp4", "none")
    assert named.kl == same.kl > exact.kl == pytest.approx(0, abs=1e-9)
    assert named.codec == pytest.approx(16 / 4.5) == named.whole
    assert exact.codec == exact.whole  # nothing was coded
    with pytest.raises(OptionError, match="no method"):
        measure_points(tiny, {}, settings)
