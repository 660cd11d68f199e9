"""Which layers share codes: measured for this model and format only, one layer altered at a time."""

from __future__ import annotations

import pytest
import torch

from workbench.core import xquant_calibration
from workbench.core.xquant_calibration import sharing_sequences
from workbench.core.xquant_trials import Trials
from workbench.kv.xquant.schedule import pairs_of
from workbench.spec.errors import OptionError


def codec_of(lab, options="residual=32", family="llama"):
    return lab.make_engine("paged", f"xquant:{options}", family=family).kv.stores[0].codec


def test_another_target_needs_no_new_run(lab, calibrations, monkeypatch):
    first = codec_of(lab)
    monkeypatch.setattr(xquant_calibration, "Trials", None)  # calling it again would fail
    second = codec_of(lab)
    assert second.harm.table() == first.harm.table()
    assert codec_of(lab, "residual=32,target=1").schedule != first.schedule
    assert len(calibrations()) == 1


def test_another_model_grid_or_width_is_measured_anew(lab, calibrations):
    for options in ("residual=32", "residual=32,eta2=0", "residual=32,lk=0", "residual=32,group=16"):
        codec_of(lab, options)
    codec_of(lab, family="gemma3")
    assert len(calibrations()) == 5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_pairs_are_within_groups_and_harm_is_sane(lab, calibrations, family):
    engine = lab.make_engine("paged", "xquant:residual=32,target=1", family=family)
    harm = engine.kv.stores[0].codec.harm
    groups = [g.layers for g in engine.executor.decoder.config.kv_groups]
    assert harm.pairs == pairs_of(groups)
    assert ((0, 2) in harm.pairs) == (family == "gemma3")
    assert bool((harm.own > 0).all()) and bool((harm.shared > harm.own).all())
    # Random layers: nothing agrees beyond chance, and each law is one.
    for side in range(2):
        for i in range(len(harm.pairs)):
            found = harm.agreement(side, i)
            assert abs(found.kappa) < 0.1
            assert all(float(x.sum()) == pytest.approx(1) for x in (found.observed, found.chance))
    sharers = [p[1] for p in harm.pairs]
    for store, group in zip(engine.kv.stores, groups, strict=True):
        assert store.planes["k2"].shape[0] == len([n for n in group if n not in sharers])
    assert engine.memory()["calibration"] == harm.nbytes


def test_trials_alter_one_layer_and_put_it_back(lab):
    engine = lab.make_engine("paged", "xquant:residual=32,schedule=none")
    codec, decoder = engine.kv.stores[0].codec, engine.executor.decoder
    ids = torch.randint(0, 61, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        trials = Trials(decoder, engine.executor.op, codec, ids, 64)
        store, local = trials._home[1]
        before = store.planes["k"].clone()
        own = trials.score(0, 1, None)
        assert torch.equal(store.planes["k"][:, :3], before[:, :3])
        shared = trials.score(0, 1, 0)
        assert torch.equal(trials.score(0, 1, None), own)
        assert not torch.equal(own, trials.exact) and not torch.equal(own, shared)
        # Scored by hand: the plane of that layer, decoded, read by the same rows.
        store.planes["k"][local, 1:3] = trials._coded(1, 0)[0]
        assert torch.equal(trials._scored(), shared)


def test_calibration_text_is_whole_pages_and_what_follows():
    origin, context, ids = sharing_sequences("tiny", 4096, 2048, 128)
    assert context == 1024 and {len(i) for i in ids} == {1152} and "calibration text" in origin
    _, context, ids = sharing_sequences("none", 61, 256, 128)
    assert context == 128 and {len(i) for i in ids} == {256}
    with pytest.raises(OptionError, match="128 positions"):
        sharing_sequences("none", 61, 128, 128)
