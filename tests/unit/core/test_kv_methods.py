"""KV methods from text: what is one, what is refused, which points a sweep has, and what preparing shares."""

from __future__ import annotations

import pytest
import torch

from workbench.core import catalog
from workbench.core.kv_methods import grid, method, named, planned
from workbench.core.kv_p1 import submit_p1
from workbench.core.kv_prepared import Clock, Prepared, then
from workbench.core.kv_storage_methods import STORAGE
from workbench.core.quality_windows import QualitySettings
from workbench.kv.cached import CachedRows, Reconstructed
from workbench.kv.cachegen.config import Config, level_of
from workbench.spec.errors import InvariantError, OptionError, PlanError, RecipeError, UnknownTechnique
from workbench.spec.recipe import Recipe

SETTINGS = QualitySettings(context=70, score=20, windows=2, greedy=0)
WAIT = 60


@pytest.mark.parametrize(
    "text",
    ["kivi:bits=2", "kvtc:ratio=16", "cachegen:delta=true", "kv_fp8+kvtc:ratio=8", "snapkv:keep=0.5+kv_fp8",
     '{"id": "kvtc", "k_ratio": 8, "v_ratio": 32}', " kv_int8 + cachegen "],
)  # fmt: skip
def test_what_is_a_method(text: str) -> None:
    assert method(text) == method(str(method(text)))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("ngram", RecipeError),
        ("rtn", RecipeError),
        ("nothing_like_it", UnknownTechnique),
        ("kvtc:ratio=1", OptionError),
        ("kvtc:ratios=8", OptionError),
        ("kivi:bits=3", OptionError),
        ("kvtc+cachegen", RecipeError),
        ("kvtc+kv_fp8", RecipeError),
        ("snapkv+kvtc", RecipeError),
        ("paged", RecipeError),
        ("", RecipeError),
        ("kivi+", RecipeError),
    ],
)
def test_what_is_none(text: str, error: type) -> None:
    with pytest.raises(error):
        method(text)


@pytest.mark.parametrize("bins", ["32/16", "32/16/16/16", "a/b/c", "32/16/15", "32/16/2", "9999/16/16", ""])
def test_bins_are_three_even_numbers(bins: str) -> None:
    with pytest.raises(OptionError):
        level_of(Config(k=bins))


def test_an_alias_sets_what_it_stands_for_and_an_option_of_its_own_wins() -> None:
    made = STORAGE["kvtc"].configure("kvtc", {"ratio": 8, "v_ratio": 32})
    assert (made.k_ratio, made.v_ratio) == (8, 32)


def test_a_sweep_has_every_method_and_every_point_that_is_declared() -> None:
    points = [str(m) for m in grid()]
    assert len(set(points)) == len(points)
    assert {m.uses[0].id for m in grid()} == {*named(), *STORAGE}
    for technique in named():
        assert len(grid([technique])) == len(catalog.get(technique).spec.sweep)
    for id, storage in STORAGE.items():
        assert len(grid([id])) == len(storage.sweep)
    with pytest.raises(RecipeError, match="no KV method"):
        grid(["ngram"])


def test_pages_join_a_method_that_needs_them() -> None:
    assert planned(method("snapkv")) == Recipe.of("snapkv", "paged")
    assert planned(method("kv_fp8+kvtc")) == Recipe.of("kv_fp8")


def test_methods_of_every_kind_are_measured_together(open_session, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    session = open_session()
    texts = (
        "kivi:bits=2,group=16,residual=32",
        "kv_int8",
        "cachegen:k=64/64/64,v=64/64/64",
        "streaming_llm:keep=0.5",
    )
    ids = torch.randint(0, 61, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    found = submit_p1(session, {t: method(t) for t in texts}, ids=ids, settings=SETTINGS).result(WAIT)
    values = {n: {m.name: m.value for m in r.metrics()} for n, r in found.items()}
    assert all(v["kl"] > 0 for v in values.values())
    assert 1.9 < values["streaming_llm:keep=0.5"]["whole_ratio"] < 2.1
    assert values[texts[2]]["artefact"] > 0 and values[texts[2]]["break_even"] > 0
    assert 0 < values[texts[2]]["artefact_share"] < 100
    for timed in texts[:3]:
        assert values[timed]["encode_rate"] > 0 and values[timed]["decode_rate"] > 0
    assert "encode_rate" not in values[texts[3]]
    with pytest.raises(PlanError):
        submit_p1(session, {"x": method("kv_int8+kv_fp8")}, ids=ids, settings=SETTINGS)


def test_one_method_behind_another_codes_what_the_first_gave_back() -> None:
    rows = CachedRows((torch.ones(3, 1, 2),), (torch.ones(3, 1, 2),), torch.arange(3))

    def halves(clock: Clock, payload: int) -> Prepared:
        def run(rows: CachedRows) -> Reconstructed:
            with clock.encoding():
                k = tuple(x / 2 for x in rows.k)
            return Reconstructed(CachedRows(k, rows.v, rows.positions), payload, 1)

        return Prepared(run, "half", 5, clock)

    both = then(halves(Clock(), 10), halves(Clock(), 4))
    assert both.trip is not None and both.clock is not None
    out = both.trip(rows)
    assert out.rows.k[0].max() == 0.25 and out.payload == 4 and out.exempt == 1
    assert both.shared == 10 and both.key == "half + half"
    encode, decode = both.clock.take()
    assert encode > 0 and decode == 0 and both.clock.take() == (0, 0)
    with pytest.raises(InvariantError):
        then(Prepared(None), both)
