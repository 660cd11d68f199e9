"""Which layers share codes: measured once, remembered, of this model and format only, and cancellable."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from workbench.core import xquant_calibration
from workbench.core.xquant_calibration import sharing_harm, sharing_sequences
from workbench.core.xquant_trials import Trials
from workbench.kv.xquant.schedule import pairs_of
from workbench.spec.errors import Cancelled, OptionError


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path))
    return tmp_path


def files(folder):
    return sorted(folder.glob("calibration/*.safetensors"))


def codec_of(lab, options="residual=32", family="llama"):
    return lab.make_engine("paged", f"xquant:{options}", family=family).kv.stores[0].codec


def test_the_second_engine_reads_what_the_first_measured(lab, _own_cache, monkeypatch):
    first = codec_of(lab)
    (path,) = files(_own_cache)
    monkeypatch.setattr(xquant_calibration, "Trials", None)  # calling it again would fail
    second = codec_of(lab)
    assert second.key == first.key and second.harm.table() == first.harm.table()
    assert "random token ids" in second.harm.origin and second.harm.tokens > 0
    assert codec_of(lab, "residual=32,target=1").schedule != first.schedule  # another target, no new run
    assert files(_own_cache) == [path]


def test_another_model_grid_or_width_is_measured_anew(lab, _own_cache):
    for options in ("residual=32", "residual=32,eta2=0", "residual=32,lk=0", "residual=32,group=16"):
        codec_of(lab, options)
    codec_of(lab, family="gemma3")
    assert len(files(_own_cache)) == 5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_pairs_are_within_groups_and_harm_is_sane(lab, family):
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


@pytest.mark.parametrize("damage", [b"", b"\0" * 64])
def test_a_damaged_artefact_is_measured_again(lab, _own_cache, damage):
    first = codec_of(lab)
    files(_own_cache)[0].write_bytes(damage)
    assert codec_of(lab).key == first.key
    assert files(_own_cache)[0].stat().st_size > 64


@pytest.mark.parametrize("change", [lambda t: t * float("nan"), lambda t: t[:, :0].contiguous()])
def test_an_artefact_of_other_shape_or_without_numbers_is_measured_again(lab, _own_cache, change):
    first = codec_of(lab)
    (path,) = files(_own_cache)
    with safe_open(path, framework="pt") as file:
        notes = file.metadata()
        tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    save_file(tensors | {"own": change(tensors["own"])}, path, notes)
    assert codec_of(lab).key == first.key


def test_progress_is_told_and_cancel_leaves_nothing(lab, _own_cache):
    engine = lab.make_engine("paged", "xquant:residual=32,schedule=none")
    told: list[float] = []

    def measure(cancel):
        return sharing_harm(
            engine.executor.decoder,
            lambda: engine.executor.op,
            engine.kv.stores[0].codec,
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


def test_calibration_text_is_whole_pages_and_what_follows():
    origin, context, ids = sharing_sequences("tiny", 4096, 2048, 128)
    assert context == 1024 and {len(i) for i in ids} == {1152} and "calibration text" in origin
    _, context, ids = sharing_sequences("none", 61, 256, 128)
    assert context == 128 and {len(i) for i in ids} == {256}
    with pytest.raises(OptionError, match="128 positions"):
        sharing_sequences("none", 61, 128, 128)
