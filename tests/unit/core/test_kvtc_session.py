"""KVTC made for a session: its own model's, cancellable, and measured by P1."""

from __future__ import annotations

import pytest

from workbench.core import kvtc_calibration as module
from workbench.core.kv_p1 import submit_p1
from workbench.core.kvtc_session import submit_kvtc
from workbench.core.quality_windows import QualitySettings
from workbench.kv.kvtc.config import Config
from workbench.spec.errors import Cancelled, OptionError


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "LENGTH", 48)
    return tmp_path


def test_a_session_makes_it_and_p1_measures_it(open_session):
    session = open_session()
    config = Config(k_ratio=4, v_ratio=6, window=16, entropy="range")
    codec = submit_kvtc(session, config).result()
    assert (codec.sinks, codec.window, codec.entropy) == (4, 16, "range")
    assert codec.artefact.k.plan.budget > codec.artefact.v.plan.budget
    settings = QualitySettings(context=64, score=8, windows=2, greedy=0)
    ids = list(range(4, 60)) * 4
    job = submit_p1(session, {"kvtc": codec.round_trip}, ids=ids, settings=settings)
    metrics = {m.name: m.value for m in job.result()["kvtc"].metrics()}
    assert 0 < metrics["kl"] < 0.5 and metrics["codec_ratio"] > 1 and metrics["whole_ratio"] > 1
    assert submit_kvtc(session, config).result().key == codec.key


def test_cancelling_leaves_nothing(open_session, _small):
    session = open_session()
    job = submit_kvtc(session)
    job.cancel()
    with pytest.raises(Cancelled):
        job.result()
    assert not list(_small.glob("calibration/*"))


def test_an_impossible_ratio_fails_the_job_alone(open_session):
    session = open_session()
    with pytest.raises(OptionError, match="ratio"):
        submit_kvtc(session, Config(k_ratio=1.0)).result()
    assert session.generate("Still here", max_tokens=2).state == "done"
