"""KVTC's calibration: measured once, remembered whole, never of another model, and cancellable."""

from __future__ import annotations

import pytest
import torch

from workbench.core import kvtc_calibration as module
from workbench.core.kv_calibration import kv_rows
from workbench.core.kvtc_calibration import calibration_sequences, cut_sequences, kvtc_calibration
from workbench.kv.cached import CachedRows
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.joint import JointRows
from workbench.spec.errors import Cancelled, OptionError, PayloadError

pytestmark = pytest.mark.usefixtures("calibrations")
IDS = [torch.randint(0, 61, (80,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(9)]


def calibrate(lab, family="llama", **kwargs):
    engine = lab.make_engine("paged", family=family)
    decoder = engine.executor.decoder
    kwargs = {"model": "none", "weights": ("w",), "text": ("random ids", IDS)} | kwargs
    return decoder, engine.executor.op, kvtc_calibration(decoder, lambda: engine.executor.op, **kwargs)


def test_the_artefact_is_read_back_number_by_number(lab, calibrations, monkeypatch):
    _, _, first = calibrate(lab)
    (path,) = calibrations()
    monkeypatch.setattr(module, "kv_rows", None)  # calling it again would fail
    _, _, second = calibrate(lab)
    assert calibrations() == [path] and first.tokens == 8 * 76 and first.origin == "random ids"
    assert second.artefact(8, 16).key == first.artefact(8, 16).key
    for a, b in ((first.k, second.k), (first.v, second.v)):
        assert a[0].total == b[0].total and torch.equal(a[0].variance, b[0].variance)
        assert torch.equal(a[1].error, b[1].error) and a[1].sizes == b[1].sizes


@pytest.mark.parametrize("damage", [b"", b"\0" * 64], ids=["empty", "zeros"])
def test_a_damaged_artefact_is_measured_again(lab, calibrations, damage):
    key = calibrate(lab)[2].artefact(8, 8).key
    calibrations()[0].write_bytes(damage)
    assert calibrate(lab)[2].artefact(8, 8).key == key
    assert calibrations()[0].stat().st_size > 64


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_real_rows_of_every_family_come_back(lab, family):
    """Norms of k, sliding layers and their phases included: rotations undone wrongly would cost far more."""
    decoder, op, calibration = calibrate(lab, family)
    joint = JointRows(decoder.config)
    codec = Kvtc(calibration.artefact(4, 4), joint, decoder.weights.fingerprint, window=16)
    found = {layer: (k, v) for layer, k, v in kv_rows(decoder, op, IDS[8][::-1], 16)}
    rows = CachedRows(*(tuple(found[i][s] for i in range(len(found))) for s in range(2)), torch.arange(80))
    out = codec.decode(codec.encode(rows))
    for layer in joint.layers:
        for a, b in ((rows.k[layer], out.k[layer]), (rows.v[layer], out.v[layer])):
            middle = slice(4, 52)
            spread = (a[middle] - a[middle].mean(0)).square().sum()
            assert 0 < (a - b)[middle].square().sum() < 0.15 * spread


def test_another_model_is_calibrated_anew_and_refuses_the_first_ones_artefact(lab, calibrations):
    _, _, llama = calibrate(lab)
    decoder, _, _ = calibrate(lab, "qwen2")
    assert len(calibrations()) == 2
    with pytest.raises(PayloadError, match="other weights"):
        Kvtc(llama.artefact(8, 8), JointRows(decoder.config), decoder.weights.fingerprint)


def test_progress_is_told_and_cancel_leaves_nothing(lab, calibrations):
    told: list[float] = []

    def progress(done, what):
        told.append(done)

    for after in (0, 3, 10):
        with pytest.raises(Cancelled):
            calibrate(lab, progress=progress, cancel=lambda after=after: len(told) >= after)
        assert calibrations() == [] and told == sorted(told)
        told.clear()
    calibrate(lab, progress=progress)
    assert told[-1] == 1.0 and told == sorted(told) and len(calibrations()) == 1


def test_it_says_when_the_moments_do_not_fit(lab, monkeypatch):
    monkeypatch.setattr(module, "available", lambda device: 1000)
    with pytest.raises(OptionError, match="features"):
        calibrate(lab)


def test_sequences_are_of_the_calibration_text_and_do_not_overlap():
    origin, ids = calibration_sequences("tiny", 4096, 2048)
    assert "calibration text" in origin and {len(i) for i in ids} == {1024} and 2 <= len(ids) <= 18
    assert "random token ids" in calibration_sequences("no such model", 50, 64)[0]
    cut = cut_sequences(range(100), 10)
    assert len(cut) == 10 and [i for s in cut for i in s] == list(range(100))
    with pytest.raises(OptionError, match="19 tokens"):
        cut_sequences(range(19), 10)
