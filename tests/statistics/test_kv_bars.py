"""The table of bars on SmolLM2-135M, what coding by age is worth at long contexts, and needles; nightly.

Every bar is met and everything that must fail does, on the shipped evaluation text. On a model that recalls,
needles tell methods apart.
"""

from __future__ import annotations

import pytest

from workbench import measure
from workbench.core.kv_bars import BARS, rows_of, submit_bars
from workbench.core.kv_methods import method
from workbench.core.kv_runs import RatePoint
from workbench.core.needle import NeedleSettings
from workbench.core.needle_run import submit_needle
from workbench.core.quality_windows import QualitySettings
from workbench.models.registry import resolve
from workbench.spec.errors import ModelNotFound


@pytest.fixture(scope="module")
def smollm2():
    try:
        resolve("smollm2-135m")
    except ModelNotFound as err:
        pytest.skip(err.hint)
    with measure.opened("smollm2-135m") as session:
        yield session


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_bar(smollm2):
    """Sizes, KL and what must fail. Perplexity stays in the table: it spreads as far as it moves."""
    found = submit_bars(smollm2, QualitySettings(greedy=0), points=measure.Points()).result()
    numbers = {n: {m.name: m.value for m in r.metrics()} for n, r in found.items()}
    for bar in BARS:
        assert numbers[bar.method]["codec_ratio"] >= bar.codec and numbers[bar.method]["kl"] <= bar.kl, bar
    missed = [f"{r.technique}: {r.bar}" for r in rows_of(found)[len(BARS) :] if not r.met]
    assert not missed, "\n".join(missed)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_coding_by_age_beats_one_ratio_at_long_contexts(smollm2):
    """Whole cache at 40 times and more, at 4,096 tokens: at least 15 % less KL than KVTC in as many bytes."""
    settings = QualitySettings(context=4101, score=191, windows=2, greedy=0)  # all but 4 rows in whole chunks
    by_age, *alone = (
        RatePoint.of(run)
        for run in measure.p1(
            smollm2,
            "kvtc_graded:ratio=48,near=32x8/224x16/768x32",
            "kvtc:ratio=38,window=0",
            "kvtc:ratio=46,window=16",
            settings=settings,
            points=measure.Points(),
        )
    )
    assert by_age.whole >= 40
    for one in alone:
        assert one.whole <= 1.01 * by_age.whole  # no fewer bytes
        assert by_age.kl <= 0.85 * one.kl


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_needles_tell_methods_apart(smollm2):
    names = ("kv_fp8", "kvtc:ratio=16", "streaming_llm:keep=0.25")
    settings = NeedleSettings(context=1024, depths=5, trials=2)
    found = submit_needle(smollm2, {n: method(n) for n in names}, settings=settings).result()
    assert all(r.valid for r in found.values())
    recall = {n: sum(r.recalled) / len(r.recalled) for n, r in found.items()}
    assert recall["kv_fp8"] >= 0.9 and recall["kvtc:ratio=16"] >= 0.8
    # What lies outside sinks and recent tokens is gone: at 25 % the last depth alone can be recalled.
    assert recall["streaming_llm:keep=0.25"] <= 0.4
