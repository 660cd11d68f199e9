"""Protocol P1: exact KV coded and decoded, the scored tokens' own KV exact, honest ratios."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from workbench.core.kv_p1 import p1_steps, read_rows, submit_p1, write_rows
from workbench.core.quality_windows import QualitySettings, cut
from workbench.engine.score import score
from workbench.kv.cached import CachedRows, Reconstructed, page_format
from workbench.kv.kivi import KiviCodec
from workbench.kv.kv_int8 import Int8Codec
from workbench.spec.errors import PlanError, RequestError
from workbench.spec.recipe import Recipe

SETTINGS = QualitySettings(context=70, score=20, windows=2, greedy=0, chunk=7)
WAIT = 60


def ids(n: int) -> list[int]:
    return torch.randint(0, 61, (n,), generator=torch.Generator().manual_seed(0)).tolist()


def identity(rows: CachedRows) -> Reconstructed:
    return Reconstructed(rows, rows.nbytes_16bit())


def finish(steps):
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def measure(engine, **methods):
    return finish(p1_steps(engine, cut(ids(200), SETTINGS), methods, SETTINGS, lambda *told: None))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_that_come_back_as_they_were_change_nothing(lab, family):
    engine = lab.make_engine("paged:page_size=16", family=family, pool=512, context=128)
    found = measure(engine, same=identity)["same"]
    values = {m.name: m.value for m in found.metrics()}
    assert values["kl"] < 1e-12 and values["top1"] == 100 and abs(values["perplexity_change"]) < 1e-9
    assert values["codec_ratio"] == values["whole_ratio"] == 1
    assert sum(len(w.kl) for w in found.windows) == 40
    assert engine.kv.pools[0].used == 0


def test_the_scored_tokens_read_what_the_method_gave(lab):
    engine = lab.make_engine("paged:page_size=16", pool=512, context=128)

    def forget(rows: CachedRows) -> Reconstructed:
        return Reconstructed(dataclasses.replace(rows, v=tuple(torch.zeros_like(v) for v in rows.v)), 1)

    def only_last(rows: CachedRows) -> Reconstructed:
        v = [v.clone() for v in rows.v]
        v[-1][-1] += 100.0
        return Reconstructed(dataclasses.replace(rows, v=tuple(v)), 1)

    found = measure(engine, forget=forget, only_last=only_last)
    kl = {name: next(m.value for m in r.metrics() if m.name == "kl") for name, r in found.items()}
    assert kl["forget"] > 1e-3 and kl["only_last"] > 1e-6


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_are_read_and_written_layer_by_layer(lab, family):
    engine = lab.make_engine("paged:page_size=16", family=family, pool=512, context=128)
    text = ids(60)
    rows = None
    for block in score(engine, text, 50):
        if block.logits is None:
            rows = read_rows(engine, block.sequence, 49)
    assert rows is not None and rows.tokens == 49 and len(rows.k) == engine.executor.decoder.config.num_layers
    assert all(k.shape == v.shape == (49, *rows.k[0].shape[1:]) for k, v in zip(rows.k, rows.v, strict=True))
    back = []

    def fill(sequence):
        write_rows(engine, sequence, rows)
        back.append(read_rows(engine, sequence, 49))

    for _ in score(engine, text, 50, fill=fill):
        pass
    assert all(torch.equal(a, b) for a, b in zip((*rows.k, *rows.v), (*back[0].k, *back[0].v), strict=True))


def test_a_page_format_codes_whole_pages_and_counts_what_it_does_not():
    k, v = torch.randn(2, 45, 2, 32).unbind()
    rows = CachedRows((k, k + 1), (v, v - 1), torch.arange(45))
    out = page_format(KiviCodec(4, 16, 32), 32)(rows)
    assert out.exempt == 13
    for a, b in zip((*rows.k, *rows.v), (*out.rows.k, *out.rows.v), strict=True):
        assert torch.equal(a[32:], b[32:]) and not torch.equal(a[:32], b[:32])
        assert (a - b).abs().max() < 0.5
    coded = (
        2 * 2 * 32 * 2 * (32 / 2 + 2 * 2 * 32 / 16) / 1
    )  # layers, planes, tokens, heads; codes, two halves
    assert out.payload == coded + 13 * 2 * 2 * 2 * 32 * 2
    short = page_format(KiviCodec(4, 16, 32), 32)(
        CachedRows(tuple(x[:20] for x in rows.k), tuple(x[:20] for x in rows.v), torch.arange(20))
    )
    assert short.exempt == 20 and torch.equal(short.rows.k[0], k[:20])
    assert short.payload == short.rows.nbytes_16bit()
    token = page_format(Int8Codec(), 16)(rows)
    assert token.exempt == 0 and token.payload == 2 * 45 * 2 * 2 * (32 + 2)


def test_fewer_rows_may_come_back_and_stand_for_what_an_engine_keeps(lab, open_session):
    """Sinks and recent rows given back by a round trip: what StreamingLLM's selection leaves in an engine."""
    kept = torch.cat([torch.arange(4), torch.arange(69 - 30, 69)])  # half of 69 rows, rounded down

    def drops(rows: CachedRows) -> Reconstructed:
        def some(side):
            return tuple(x[kept] for x in side)

        left = CachedRows(some(rows.k), some(rows.v), rows.positions[kept])
        return Reconstructed(left, left.nbytes_16bit())

    methods = {"rows": drops, "engine": Recipe.of("streaming_llm:keep=0.5,rerotate=false"), "same": identity}
    found = submit_p1(open_session(), methods, ids=ids(200), settings=SETTINGS).result(WAIT)
    rows, engine = found["rows"], found["engine"]
    assert [len(w.kl) for w in rows.windows] == [20, 20]
    for a, b in zip(rows.windows, engine.windows, strict=True):
        assert a.nll == pytest.approx(b.nll, abs=1e-4) and max(a.kl) > 1e-6
    assert rows.results[0].error is None and found["same"].results[0].error == 0
    assert rows.ratio(whole=True) == pytest.approx(69 / len(kept))


def test_recipes_are_measured_in_a_session_with_progress(open_session):
    session = open_session()
    job = submit_p1(
        session,
        {"int8": Recipe.of("kv_int8"), "fp4": Recipe.of("kv_fp4"), "same": identity},
        ids=ids(200),
        settings=SETTINGS,
    )
    found = job.result(WAIT)
    values = {n: {m.name: m.value for m in r.metrics()} for n, r in found.items()}
    assert values["same"]["kl"] == 0
    assert 0 < values["int8"]["kl"] < values["fp4"]["kl"]
    assert values["fp4"]["codec_ratio"] == pytest.approx(16 / 4.5)
    assert session.generate("Hello", max_tokens=2).token_ids


def test_a_measurement_can_be_cancelled_and_bad_input_is_refused_at_once(open_session, slow_down):
    session = open_session()
    job = submit_p1(
        session, {"same": identity}, ids=ids(4000), settings=dataclasses.replace(SETTINGS, windows=40)
    )
    job.cancel()
    assert job.wait(WAIT) and job.state == "cancelled"
    with pytest.raises(PlanError):
        submit_p1(session, {"x": Recipe.of("kv_int8", "kv_fp8")}, ids=ids(200), settings=SETTINGS)
    with pytest.raises(RequestError):
        submit_p1(session, {"same": identity}, ids=ids(20), settings=SETTINGS)
    alone = submit_p1(
        session, {"same": identity}, ids=ids(200), settings=dataclasses.replace(SETTINGS, context=1)
    )
    with pytest.raises(RequestError, match="context"):
        alone.result(WAIT)
    assert session.generate("Hello", max_tokens=2).token_ids
