"""KVTC on real models and text: the bars of its ratios, and the ablations that must fail.

Measured by protocol P1 on the shipped evaluation text, calibrated on the shipped calibration text, which
share no document. On the tiny model in the ordinary run; on SmolLM2-135M, when it was fetched, nightly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

import pytest
import torch

from workbench.core.bound import attention_op
from workbench.core.build_weights import weights_key
from workbench.core.kv_calibration import kv_rows
from workbench.core.kv_p1 import submit_p1
from workbench.core.kvtc_calibration import SINKS, calibration_sequences, kvtc_calibration
from workbench.core.quality_windows import QualitySettings
from workbench.core.session import Session
from workbench.kv.kvtc.account import account
from workbench.kv.kvtc.artefact import Calibration
from workbench.kv.kvtc.basis import Moments
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.distortion import measure
from workbench.kv.kvtc.joint import JointRows
from workbench.models.registry import resolve
from workbench.spec.errors import ModelNotFound
from workbench.spec.plan import EngineLimits


class Lab:
    """A session, its calibration, and P1 on it."""

    def __init__(self, model: str, settings: QualitySettings) -> None:
        limits = EngineLimits(kv_pool_tokens=settings.slots, max_sequences=1, max_context=settings.slots)
        self.session = Session(model, dtype="float32", limits=limits)
        self.settings, self.plan = settings, self.session.plan
        self.joint = JointRows(self.session.source.config)
        self.calibration: Calibration = self._task(
            lambda decoder, op: kvtc_calibration(
                decoder, lambda: op, model=model, weights=weights_key(self.plan)
            )
        )

    def _task(self, call):
        def work(job, _):
            decoder = self.session.decoder(self.plan, lambda done, what: None, job.token)
            yield
            return call(decoder, attention_op(self.plan, decoder.config))

        return self.session.task("calibration", work).result()

    def within(self, block: int) -> Calibration:
        """The toy: no component mixes more than ``block`` features. Same text, errors, budget and program."""
        _, ids = calibration_sequences(self.plan.model, 0, 2048)

        def call(decoder, op):
            moments = [Moments(self.joint.features) for _ in range(2)]
            held = [torch.empty(0)] * 2
            for i, sequence in enumerate(ids):
                rows = {layer: (k, v) for layer, k, v in kv_rows(decoder, op, sequence, 64)}
                k, v = ([rows[n][side] for n in sorted(rows)] for side in range(2))
                flats = self.joint.keys(k, torch.arange(len(sequence))), self.joint.values(v)
                for side, flat in enumerate(flats):
                    if i == 7:
                        held[side] = flat[SINKS:]
                    else:
                        moments[side].add(flat[SINKS:])
            sides = []
            for m, rest in zip(moments, held, strict=True):
                basis = m.basis(self.joint.features, block)
                sides.append((basis, measure(basis.project(rest[::4]))))
            cross = self.calibration.cross.cut(0, 0)  # DEFLATE takes no notice of it
            return replace(self.calibration, k=sides[0], v=sides[1], cross=cross)

        return self._task(call)

    def codec(self, ratio: float, calibration: Calibration | None = None, **options: object) -> Kvtc:
        made = calibration or self.calibration
        return Kvtc(made.artefact(ratio, ratio), self.joint, made.model, **options)  # type: ignore[arg-type]

    def kl(self, codecs: dict[str, Kvtc]) -> dict[str, float]:
        """Nats per scored token."""
        methods = {name: codec.round_trip for name, codec in codecs.items()}
        found = submit_p1(self.session, methods, settings=self.settings).result()
        return {name: mean(x for w in r.windows for x in w.kl) for name, r in found.items()}

    def sizes(self, ratio: float) -> dict[str, float]:
        """Codec ratios by entropy stage, on the first window's context."""
        ratios: dict[str, float] = {}

        def trip(rows):
            for entropy in ("none", "deflate", "range"):
                codec = self.codec(ratio, entropy=entropy, window=32)
                ratios.setdefault(entropy, account(codec, codec.encode(rows)).codec_ratio)
            return self.codec(ratio).round_trip(rows)

        submit_p1(self.session, {"sizes": trip}, settings=replace(self.settings, windows=1)).result()
        return ratios


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Iterator[Lab]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        lab = Lab("tiny", QualitySettings(context=512, score=64, windows=3, greedy=0))
        yield lab
        lab.session.close()


@pytest.mark.slow
def test_a_joint_basis_is_what_makes_it_work(tiny):
    ratios = (4, 8, 16)
    codecs = {f"{r}": tiny.codec(r, window=32) for r in ratios}
    codecs["head"] = tiny.codec(16, tiny.within(tiny.joint.dim), window=32)
    found = tiny.kl(codecs)
    assert found["4"] < found["8"] < found["16"] < 0.02
    assert 2 * found["16"] < found["head"]


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [8, 16])
def test_entropy_stages_on_real_codes(tiny, ratio):
    found = tiny.sizes(ratio)
    assert found["none"] == pytest.approx(ratio, rel=0.02)
    assert found["deflate"] > 1.05 * found["none"] and found["range"] > 1.05 * found["deflate"]


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Lab]:
    try:
        resolve("smollm2-135m")
    except ModelNotFound as err:
        pytest.skip(err.hint)
    lab = Lab("smollm2-135m", QualitySettings(greedy=0))
    yield lab
    lab.session.close()


BARS = {8: 0.008, 16: 0.022, 32: 0.055, 64: 0.11}
"""KL at most, for the ratio before DEFLATE."""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_bars(smollm2):
    found = smollm2.kl({str(r): smollm2.codec(r) for r in BARS})
    for ratio, bar in BARS.items():
        assert found[str(ratio)] <= bar
        sizes = smollm2.sizes(ratio)
        assert sizes["deflate"] >= 1.12 * sizes["none"] and sizes["range"] >= 1.05 * sizes["deflate"]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_what_must_ruin_it(smollm2):
    heads = smollm2.within(smollm2.joint.dim)
    found = smollm2.kl(
        {
            "whole": smollm2.codec(8),
            "sinks": smollm2.codec(8, sinks=0),
            "head": smollm2.codec(8, heads),
        }
    )
    assert found["sinks"] >= 10 * found["whole"] and found["head"] >= 10 * found["whole"]
