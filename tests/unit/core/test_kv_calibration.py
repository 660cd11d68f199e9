"""Calibration of KV formats: never of another model, a layer's for the layer, on text of its own."""

from __future__ import annotations

from workbench.core.kv_calibration import calibration_ids
from workbench.core.texts import shipped_text


def codec_of(lab, family="llama", **kwargs):
    return lab.make_engine("paged", "kv_fp4", family=family, **kwargs).kv.stores[0].codec


def test_another_model_is_calibrated_anew(lab, calibrations):
    keys = {codec_of(lab, family).key for family in ("llama", "qwen2", "gemma3")}
    assert len(keys) == len(calibrations()) == 3


def test_every_layer_is_bound_to_its_own_ranges(lab, calibrations):
    engine = lab.make_engine("paged", "kv_fp4", family="gemma3")
    codec = engine.kv.stores[0].codec
    bound = [c.factors for store in engine.kv.stores for c in store._codecs]
    layers = [n for group in engine.executor.decoder.config.kv_groups for n in group.layers]
    assert len(engine.kv.stores) == 2 and bound == [codec.at(n).factors for n in layers]
    assert len(set(bound)) == len(bound)


def test_calibration_text_and_evaluation_text_share_no_document():
    evaluation, calibration = shipped_text("evaluation"), shipped_text("calibration")
    assert len(calibration) > 20_000 and len(evaluation) > 100_000
    size = 200
    pieces = {calibration[i : i + size] for i in range(0, len(calibration) - size, size)}
    assert not any(piece in evaluation for piece in pieces)
    origin, ids = calibration_ids("tiny", 4096, 2048)
    assert "calibration text" in origin and {len(i) for i in ids} == {512}
