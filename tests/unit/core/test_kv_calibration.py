"""Calibration of KV formats: measured once, remembered, never of another model, and cancellable."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from workbench.core import kv_calibration
from workbench.core.kv_calibration import calibration_ids
from workbench.core.texts import shipped_text
from workbench.spec.errors import Cancelled


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    return tmp_path


def files(folder):
    return sorted(folder.glob("calibration/*.safetensors"))


def codec_of(lab, family="llama", **kwargs):
    return lab.make_engine("paged", "kv_fp4", family=family, **kwargs).kv.stores[0].codec


def test_the_second_engine_reads_what_the_first_measured(lab, _own_cache, monkeypatch):
    first = codec_of(lab)
    (path,) = files(_own_cache)
    monkeypatch.setattr(kv_calibration, "kv_rows", None)  # calling it again would fail
    second = codec_of(lab)
    assert second.key == first.key and torch.equal(second.ranges.mean, first.ranges.mean)
    assert "random token ids" in second.ranges.origin and second.ranges.tokens > 0
    assert files(_own_cache) == [path]


def test_another_model_is_calibrated_anew(lab, _own_cache):
    keys = {codec_of(lab, family).key for family in ("llama", "qwen2", "gemma3")}
    assert len(keys) == len(files(_own_cache)) == 3


@pytest.mark.parametrize("damage", [b"", b"\0" * 64])
def test_a_damaged_artefact_is_measured_again(lab, _own_cache, damage):
    first = codec_of(lab)
    files(_own_cache)[0].write_bytes(damage)
    assert codec_of(lab).key == first.key
    assert files(_own_cache)[0].stat().st_size > 64


@pytest.mark.parametrize("change", [lambda t: t * float("nan"), lambda t: t[:, :1].contiguous()])
def test_an_artefact_of_other_shape_or_without_numbers_is_measured_again(lab, _own_cache, change):
    first = codec_of(lab)
    (path,) = files(_own_cache)
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
        tensors = {name: change(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, notes)
    assert codec_of(lab).key == first.key


def test_every_layer_is_bound_to_its_own_ranges(lab):
    engine = lab.make_engine("paged", "kv_fp4", family="gemma3")
    codec = engine.kv.stores[0].codec
    bound = [c.factors for store in engine.kv.stores for c in store._codecs]
    layers = [n for group in engine.executor.decoder.config.kv_groups for n in group.layers]
    assert len(engine.kv.stores) == 2 and bound == [codec.at(n).factors for n in layers]
    assert len(set(bound)) == len(bound)


def test_progress_is_told_and_cancel_leaves_nothing(lab, _own_cache):
    engine = lab.make_engine("paged")
    told: list[float] = []

    def measure(cancel):
        return kv_calibration.kv_ranges(
            engine.executor.decoder,
            lambda: engine.executor.op,
            model="none",
            weights=("w",),
            progress=lambda done, what: told.append(done),
            cancel=cancel,
        )

    with pytest.raises(Cancelled):
        measure(lambda: len(told) == 3)
    assert files(_own_cache) == [] and told == sorted(told)
    assert measure(None).tokens > 0
    assert told[-1] == 1.0


def test_calibration_text_and_evaluation_text_share_no_document():
    evaluation, calibration = shipped_text("evaluation"), shipped_text("calibration")
    assert len(calibration) > 20_000 and len(evaluation) > 100_000
    size = 200
    pieces = {calibration[i : i + size] for i in range(0, len(calibration) - size, size)}
    assert not any(piece in evaluation for piece in pieces)
    origin, ids = calibration_ids("tiny", 4096, 2048)
    assert "calibration text" in origin and {len(i) for i in ids} == {512}
