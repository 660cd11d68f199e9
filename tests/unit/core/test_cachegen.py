"""CacheGen on a model: tables remembered, a context stored and restored, text chunks really computed."""

from __future__ import annotations

import pytest
import torch

from workbench.core import cachegen_calibration
from workbench.core.cachegen_calibration import cachegen_artefact
from workbench.core.cachegen_transfer import restore, store_context
from workbench.core.kv_p1 import p1_steps
from workbench.core.quality_windows import QualitySettings, cut
from workbench.kv.cached import CachedRows
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.context import round_trip
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import DELTA_LEVELS, LEVELS
from workbench.kv.cachegen.link import BandwidthTrace
from workbench.kv.cachegen.policy import TEXT, Adaptive
from workbench.kv.cachegen.transfer import simulate
from workbench.spec.errors import Cancelled, CapacityError, OptionError

USES = ("paged:page_size=16",)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    return tmp_path


def ids(n: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def artefact_of(engine, levels=LEVELS, **kwargs):
    text = ("random ids", [ids(90, 1), ids(90, 2)])
    return cachegen_artefact(
        engine.executor.decoder,
        lambda: engine.executor.op,
        model="m",
        weights=(),
        levels=levels,
        text=text,
        **kwargs,
    )


def codec_of(engine, levels=LEVELS) -> CacheGen:
    decoder = engine.executor.decoder
    return CacheGen(artefact_of(engine, levels), Layout(decoder.config), decoder.weights.fingerprint)


def close(a: CachedRows, b: CachedRows, within: float) -> bool:
    pairs = zip((*a.k, *a.v), (*b.k, *b.v), strict=True)
    return all(torch.allclose(x, y, atol=within, rtol=within) for x, y in pairs)


def test_tables_are_measured_once_per_model_and_set_of_levels(lab, _own_cache, monkeypatch):
    engine = lab.make_engine(*USES, pool=512, context=128)
    first = artefact_of(engine)
    assert first.tokens == 180 and first.origin == "random ids"
    more = artefact_of(engine, LEVELS + DELTA_LEVELS)
    assert len(list(_own_cache.glob("calibration/cachegen-*.safetensors"))) == 2
    assert more.key(LEVELS[0]) == first.key(LEVELS[0])  # the same text: chunks of one decode with the other
    monkeypatch.setattr(cachegen_calibration, "kv_rows", None)
    assert artefact_of(engine).key(LEVELS[1]) == first.key(LEVELS[1])
    for path in _own_cache.glob("calibration/cachegen-*.safetensors"):
        path.write_bytes(b"\0" * 64)
    with pytest.raises(TypeError):  # a damaged artefact is measured again, here with nothing
        artefact_of(engine)


def test_other_models_have_other_tables(lab):
    found = [artefact_of(lab.make_engine(*USES, family=f, pool=512, context=128)) for f in ("llama", "qwen2")]
    assert found[0].model != found[1].model and found[0].key(LEVELS[0]) != found[1].key(LEVELS[0])


def test_a_model_without_a_tokenizer_is_calibrated_on_random_ids(lab):
    engine = lab.make_engine(*USES, pool=512, context=128)
    found = cachegen_artefact(
        engine.executor.decoder, lambda: engine.executor.op, model="none", weights=(), levels=LEVELS[1:2]
    )
    assert "random token ids" in found.origin and found.tokens > 0


def test_calibration_tells_its_progress_and_a_cancelled_one_leaves_nothing(lab, _own_cache):
    engine = lab.make_engine(*USES, pool=512, context=128)
    told: list[float] = []
    with pytest.raises(Cancelled):
        artefact_of(engine, progress=lambda f, _: told.append(f), cancel=lambda: bool(told))
    assert told == [0.5] and not list(_own_cache.glob("calibration/cachegen-*"))
    artefact_of(engine, progress=lambda f, _: told.append(f))
    assert told == [0.5, 0.5, 1.0]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_context_sent_as_text_is_the_exact_one(lab, family):
    engine = lab.make_engine(*USES, family=family, pool=512, context=128, dtype="float64", numerics="pinned")
    codec, text = codec_of(engine), ids(100)
    stored = store_context(engine, codec, text, levels=LEVELS[:2], chunk=40)
    assert stored.spans == ((0, 40), (40, 80), (80, 100)) and [len(p) for p in stored.payloads] == [2] * 3
    for offer, payloads in zip(stored.offers, stored.payloads, strict=True):
        assert offer.sizes == tuple(map(len, payloads)) and min(*offer.decode, offer.compute) > 0
    assert [o.text for o in stored.offers] == [160, 160, 80]
    by_text = restore(engine, codec, stored, [TEXT] * 3)
    whole = restore(engine, codec, store_context(engine, codec, text, levels=LEVELS[:1], chunk=100), [TEXT])
    assert close(by_text, whole, 1e-12)
    assert engine.kv.pools[0].used == 0


def test_a_text_chunk_is_computed_on_what_was_restored_before_it(lab):
    engine = lab.make_engine(*USES, pool=512, context=128)
    codec = codec_of(engine)
    stored = store_context(engine, codec, ids(100), chunk=40)
    exact = restore(engine, codec, stored, [TEXT, TEXT, TEXT])
    mixed = restore(engine, codec, stored, [3, TEXT, 0])
    assert torch.equal(mixed.positions, exact.positions)
    first, last = codec.decode(stored.payloads[0][3]), codec.decode(stored.payloads[2][0])
    assert torch.equal(mixed.k[1][:40], first.k[1]) and torch.equal(mixed.v[0][80:], last.v[0])
    assert torch.equal(mixed.k[0][40:80], exact.k[0][40:80])  # the first layer sees embeddings only
    assert not torch.equal(mixed.k[1][40:80], exact.k[1][40:80])  # later ones attend to the lossy chunk


def test_text_may_follow_a_coded_chunk_whatever_the_windows(lab):
    """The text's first tokens see rows of the chunk before, in sliding-window layers too."""
    engine = lab.make_engine(*USES, family="gemma3", pool=512, context=128)
    windows = [w for w in (engine.executor.decoder.config.window(i) for i in range(4)) if w is not None]
    assert windows and min(windows) < 40
    codec = codec_of(engine, DELTA_LEVELS + LEVELS)
    stored = store_context(engine, codec, ids(120), levels=LEVELS[:1], chunk=60)
    exact, mixed = (restore(engine, codec, stored, choices) for choices in ((TEXT, TEXT), (0, TEXT)))
    for a, b in zip((*exact.k, *exact.v), (*mixed.k, *mixed.v), strict=True):
        assert (a[60:] - b[60:]).norm() < 0.1 * a[60:].norm()


def test_a_simulated_transfer_can_be_restored(lab):
    engine = lab.make_engine(*USES, pool=512, context=128)
    codec = codec_of(engine)
    stored = store_context(engine, codec, ids(120), chunk=20)
    total = sum(o.sizes[0] for o in stored.offers)
    run = simulate(stored.offers, BandwidthTrace.steady(total / 60), Adaptive(text="never"), 50.0)
    assert len(set(run.choices)) > 1 and not run.late
    rows = restore(engine, codec, stored, run.choices)
    assert rows.tokens == 120
    for bad in (run.choices[:-1], [9] * 6):
        with pytest.raises(OptionError):
            restore(engine, codec, stored, bad)


def test_storing_can_be_cancelled_and_is_refused_when_it_does_not_fit(lab):
    engine = lab.make_engine(*USES, pool=64, context=128)
    codec = codec_of(engine)
    told: list[float] = []
    with pytest.raises(Cancelled):
        store_context(
            engine,
            codec,
            ids(60),
            chunk=20,
            progress=lambda f, _: told.append(f),
            cancel=lambda: len(told) >= 5,
        )
    assert told == sorted(told) and len(told) == 5 and engine.kv.pools[0].used == 0
    with pytest.raises(CapacityError, match="KV pool"):
        store_context(engine, codec, ids(100), chunk=50)
    assert engine.kv.pools[0].used == 0
    with pytest.raises(OptionError, match="no tokens"):
        store_context(engine, codec, [])


def test_finer_levels_change_the_following_tokens_less(lab):
    """Protocol P1 on a random model, end to end."""
    settings = QualitySettings(context=70, score=20, windows=2, greedy=0, chunk=20)
    engine = lab.make_engine(*USES, pool=512, context=128)
    codec = codec_of(engine)
    trips = {n.name: round_trip(codec, n, chunk=40) for n in (LEVELS[0], LEVELS[3])}
    steps = p1_steps(engine, cut(ids(200), settings), trips, settings, lambda *told: None)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found = end.value
            break
    values = {n: {m.name: m.value for m in r.metrics()} for n, r in found.items()}
    fine, coarse = (values[n.name] for n in (LEVELS[0], LEVELS[3]))
    assert 0 < fine["kl"] < coarse["kl"] and fine["codec_ratio"] < coarse["codec_ratio"]
