"""Views of storage codecs: spectrum and bits, ratio by length, a context that arrives, codes that agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from workbench.core.session import Session
from workbench.kv.cachegen.policy import TEXT, Fixed, Offer
from workbench.kv.kvtc.formats import BITS, HEADER_BITS
from workbench.spec.errors import OptionError
from workbench.widgets.kv_views import (
    compare_codes,
    ratios_by_length,
    read_cache,
    read_spectrum,
    stream_context,
)
from workbench.widgets.kv_views.transfer_view import TransferView, typical


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        with Session("tiny", dtype="float32") as session:
            yield session


@pytest.fixture(scope="module")
def spectrum(tiny: Any) -> Any:
    return read_spectrum(tiny, (4, 16))


@pytest.fixture(scope="module")
def cache(tiny: Any) -> Any:
    return read_cache(tiny, 300)


# -- spectrum --------------------------------------------------------------------------------------------


def test_what_is_drawn_is_the_plan(spectrum: Any) -> None:
    for ratio in (4.0, 16.0):
        for side in (0, 1):
            kinds = spectrum.stored(ratio, side)
            plan = (spectrum.artefacts[ratio].k, spectrum.artefacts[ratio].v)[side].plan
            bits = sum(BITS[k] for k in kinds if k != "dropped") + HEADER_BITS * len(plan.groups)
            assert bits == plan.bits <= 16 * 640 / ratio
    lanes = spectrum.lanes()
    assert [f.words.split("×")[0] for f in lanes.frames] == ["4", "16"]
    for frame in lanes.frames:
        for side in (0, 1):
            boxes = [b for b in frame.boxes if b.lane == side]
            assert boxes[0].start == 0 and boxes[-1].end == 640
            assert [b.start for b in boxes[1:]] == [b.end for b in boxes[:-1]]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_stop_of_the_slider_marks_one_ratio(spectrum: Any, theme: Any) -> None:
    figure = spectrum.figure(theme)
    stops = figure.layout.sliders[0].steps
    assert len(stops) == 2
    basis = spectrum.calibration.v[0]
    for ratio, stop in zip((4.0, 16.0), stops, strict=True):
        shown = [t for t, on in zip(figure.data, stop.args[0]["visible"], strict=True) if on]
        assert len(shown) == 8
        kinds = spectrum.stored(ratio, 1)
        for trace in (t for t in shown if t.xaxis == "x2"):
            for x, y in zip(trace.x, trace.y, strict=True):
                assert {"fp8, 8 bits": "fp8"}.get(trace.name, trace.name) == kinds[x - 1]
                assert y == pytest.approx(float(basis.variance[x - 1]) / basis.total, rel=1e-3)
    assert "NaN" not in figure.to_json()


def test_tables_say_what_is_kept_and_what_is_shared(spectrum: Any) -> None:
    rows = spectrum.table().to_dicts()
    assert len(rows) == 4 and all(sum(r[k] for k in ("fp8", "int4", "int2", "dropped")) == 640 for r in rows)
    shared = spectrum.shared().to_dicts()
    assert shared[0]["paid for after, tokens"] > shared[1]["paid for after, tokens"] > 0
    assert spectrum.parameters > 2_000_000


def test_ratios_that_were_not_planned_are_refused(tiny: Any, spectrum: Any) -> None:
    with pytest.raises(OptionError, match="Planned: 4, 16"):
        spectrum.codec(8)
    with pytest.raises(OptionError, match="no ratio"):
        read_spectrum(tiny, ())


@pytest.mark.slow
def test_a_basis_per_head_keeps_less_of_the_variance(tiny: Any, spectrum: Any) -> None:
    toy = read_spectrum(tiny, (16,), within="head")
    for side in "kv":
        joint, apart = (getattr(s.artefacts[16.0], side).plan.error for s in (spectrum, toy))
        assert apart > 1.2 * joint


# -- ratio by length ---------------------------------------------------------------------------------------


def test_the_whole_ratio_follows_from_the_codecs(spectrum: Any, cache: Any) -> None:
    found = ratios_by_length(spectrum, cache.rows, (16.0,), (200, 300))
    for (ratio, window), accounts in found.accounts.items():
        assert [a.tokens for a in accounts] == [200, 300]
        last = accounts[-1]
        assert last.whole_ratio == pytest.approx(found.predicted(ratio, window, 300))
        assert last.codec_ratio > 15
    assert found.accounts[16.0, 16][-1].whole_ratio > 2 * found.accounts[16.0, 128][-1].whole_ratio
    assert {t.line.dash for t in found.figure("dark").data if t.mode == "lines"} == {"longdash"}
    assert len(found.table()) == 4
    with pytest.raises(OptionError, match="300 rows"):
        ratios_by_length(spectrum, cache.rows, (16.0,), (64,))


# -- a context that arrives --------------------------------------------------------------------------------

OFFERS = tuple(Offer((4000, 2000), (0.01, 0.01), 100, 0.2) for _ in range(4))


def view(**more: Any) -> TransferView:
    given = {"model": "m", "tokens": 640, "levels": ("64", "32"), "offers": OFFERS, "slo": 1.0}
    return TransferView(**{**given, **more})


def test_the_slider_goes_from_text_to_the_finest_level() -> None:
    made = view()
    slow, fast = made.transfer(made.rates[0]), made.transfer(made.rates[-1])
    assert TEXT in slow.choices and set(fast.choices[1:]) == {0}
    assert not fast.late
    lanes = made.lanes()
    for rate, frame in zip(made.rates, lanes.frames, strict=True):
        sent = made.transfer(rate).sent
        link = [b for b in frame.boxes if b.lane == 0]
        work = [b for b in frame.boxes if b.lane == 1]
        assert [(b.start, b.end) for b in link] == [(1e3 * s.begin, 1e3 * s.arrived) for s in sent]
        assert [b.end for b in work] == [1e3 * s.ready for s in sent]
        assert frame.rules == ((1000.0, "allowed"),)
    assert "simulated" in lanes.title and json.dumps(lanes.to_dict())


def test_tables_are_simulated_and_count_what_is_late() -> None:
    made = view()
    rows = made.table().to_dicts()
    assert {r["tag"] for r in rows} == {"simulated"}
    assert rows[0]["all 64"].endswith("!") and not rows[-1]["all 64"].endswith("!")
    expected = made.transfer(made.rates[0], Fixed(0)).seconds
    assert rows[0]["all 64"] == f"{1e3 * expected:.0f} ms !"
    assert len(made.drops(8, seed=1)) == 4


def test_a_drop_delays_and_nonsense_is_refused() -> None:
    rate = view().rates[3]
    assert view(factor=10.0).transfer(rate, Fixed(0)).seconds > view().transfer(rate, Fixed(0)).seconds
    for wrong in ({"offers": ()}, {"slo": 0.0}, {"factor": 0.5}):
        with pytest.raises(OptionError):
            view(**wrong)


def test_a_slow_moment_is_no_plan() -> None:
    slow = (*OFFERS[:3], Offer((4000, 2000), (9.0, 0.01), 100, 9.0))
    assert {o.decode for o in typical(slow)} == {(0.01, 0.01)}
    short = Offer((400, 200), (0.001, 0.001), 10, 0.02)
    assert typical((*OFFERS, short))[-1] == short


def test_of_a_real_context_bytes_fall_with_the_level(tiny: Any, cache: Any) -> None:
    ids = tiny.tokenizer.encode("".join(cache.words))[:200]
    made = stream_context(tiny, ids)
    assert len(made.offers) == 2  # 160 tokens and the rest
    for offer in made.offers:
        assert list(offer.sizes) == sorted(offer.sizes, reverse=True)
    assert made.slo > 0 and made.offers[0].text == 4 * 160


# -- codes that agree --------------------------------------------------------------------------------------


def test_codes_of_neighbours_are_at_chance_and_a_copy_is_not(tiny: Any, cache: Any) -> None:
    found = compare_codes(tiny, cache.rows)
    assert found.codes.tokens == 256 and list(found.codes.pairs) == [(0, 1), (2, 3)]
    for side in found.codes.whole:
        assert abs(side.kappa) < 0.05
        assert float(side.observed[:2].sum()) > 0.75  # the premise, and it says nothing
    k, v = list(cache.rows.k), list(cache.rows.v)
    k[1], v[1] = k[0], v[0]
    same = compare_codes(tiny, type(cache.rows)(tuple(k), tuple(v), cache.rows.positions))
    assert same.codes.pairs[0, 1][0].kappa == pytest.approx(1.0)
    assert len(json.loads(found.figure("light").to_json())["data"]) == 6
    assert "measured" in found.table().to_text()


def test_less_than_a_page_cannot_be_compared(tiny: Any, cache: Any) -> None:
    short = type(cache.rows)(
        tuple(x[:100] for x in cache.rows.k), tuple(x[:100] for x in cache.rows.v), torch.arange(100)
    )
    with pytest.raises(OptionError, match="128 tokens or more"):
        compare_codes(tiny, short)
