"""Conversations saved and resumed: exact ones bit for bit, lossy ones for who asks."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.spec.errors import (
    PayloadError,
    RequestError,
)
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

pytestmark = pytest.mark.usefixtures("short_calibrations")
PAGED = ("paged:page_size=16", "prefix_cache")
LOSSY = ("kvtc:k_ratio=4,v_ratio=4,window=16", "cachegen:level=64/64/64")


@pytest.mark.parametrize("index", ["prefix_cache", "radix_cache"])
@pytest.mark.parametrize("format", [None, "kv_int8", "kivi:residual=32", "kv_fp8"])
def test_raw_comes_back_exactly_whatever_the_format(open_session, tmp_path, index, format, talk, answer):
    uses = ["paged:page_size=32", index, *([format] if format else [])]
    first = open_session(*uses)
    expected = answer(first)
    saved = first.save_cache(tmp_path / "talk.kv", talk).result()
    assert (saved.tokens, saved.cached, saved.lossy, saved.drafter) == (75, 64, False, "")
    assert saved.file_bytes == (tmp_path / "talk.kv").stat().st_size > saved.kv_bytes > 0
    assert answer(first)[0] == expected[0]
    second = open_session(*uses)
    resumed = second.resume(tmp_path / "talk.kv").result()
    assert (list(resumed.ids), resumed.cached, resumed.salt, resumed.lossy) == (talk, 64, "", False)
    assert answer(second) == (expected[0], 64)
    second._state.engine.kv.check()


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_conversations_serve_only_who_passes_their_salt(open_session, tmp_path, codec, talk, answer):
    session = open_session(*PAGED)
    plain, _ = answer(session)
    saved = session.save_cache(tmp_path / "talk.kv", talk, codec).result()
    assert saved.lossy and saved.codec == codec
    other = open_session(*PAGED)
    resumed = other.resume(tmp_path / "talk.kv").result()
    assert resumed.lossy and resumed.salt
    assert answer(other) == (plain, 0)
    ids, cached = answer(other, salt=resumed.salt)
    assert cached == 64 and len(ids) == 6
    assert answer(other, salt=resumed.salt + "x") == (plain, 0)
    # At another page size the same rows land in other pages.
    third = open_session("paged:page_size=32", "radix_cache")
    again = third.resume(tmp_path / "talk.kv").result()
    assert answer(third, salt=again.salt) == (ids, 64)


def test_a_lossy_restore_is_the_codec_s_round_trip(open_session, tmp_path, talk):
    """What lies in the pages is what the codec gives back of the exact rows, sinks and window kept."""
    session = open_session(*PAGED)
    session.save_cache(tmp_path / "raw.kv", talk).result()
    session.save_cache(tmp_path / "talk.kv", talk, LOSSY[0]).result()
    rows = {}
    for name in ("raw.kv", "talk.kv"):
        other = open_session(*PAGED)
        other.resume(tmp_path / name).result()
        k = other._state.engine.kv.stores[0].planes["k"]
        rows[name] = k[:, 1:5].transpose(2, 3).flatten(1, 2)
    exact, lossy = rows["raw.kv"], rows["talk.kv"]
    assert torch.equal(lossy[:, :4], exact[:, :4].half().float())
    assert torch.equal(lossy[:, -16:], exact[:, -16:].half().float())
    middle = (lossy - exact)[:, 4:44].norm() / exact[:, 4:44].norm()
    assert 0 < middle < 0.5


def test_a_new_process_goes_on_where_this_one_was(open_session, tmp_path, model_folder, talk, answer):
    session = open_session(*PAGED)
    expected, _ = answer(session)
    session.save_cache(tmp_path / "talk.kv", talk).result()
    code = f"""
from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.spec.recipe import Recipe
from workbench.spec.plan import EngineLimits
limits = EngineLimits(kv_pool_tokens=1024, max_sequences=8, max_context=128)
where = dict(dtype="float32", limits=limits)
with Session({str(model_folder("llama"))!r}, Recipe.of(*{PAGED!r}), **where) as session:
    resumed = session.resume({str(tmp_path / "talk.kv")!r}).result()
    run = session.submit(resumed.ids, SamplingParams(max_tokens=6), salt=resumed.salt).result()
    print(run.token_ids, run.outputs[0]["cached_tokens"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"{expected} 64"


def test_a_finished_run_is_saved_with_its_answer(open_session, tmp_path):
    session = open_session(*PAGED)
    run = session.generate(
        "Once upon a time there was a model that kept what it had read, " * 2, max_tokens=20
    )
    saved = session.save_cache(tmp_path / "talk.kv", run).result()
    assert saved.tokens == run.outputs[0]["prompt_tokens"] + 20
    resumed = open_session(*PAGED).resume(tmp_path / "talk.kv").result()
    assert list(resumed.ids[-20:]) == run.token_ids
    by_id = session.submit([4, 5], SamplingParams(max_tokens=2)).result()
    with pytest.raises(RequestError, match=r"spell|page"):
        session.save_cache(tmp_path / "other.kv", by_id).result()


@pytest.mark.parametrize("codec", ["raw", LOSSY[0]])
def test_a_drafter_s_layers_come_along_or_start_cold(open_session, tmp_path, codec, talk, answer):
    uses = (*PAGED, "draft_model:layers=1")
    session = open_session(*uses)
    plain, _ = answer(session)
    saved = session.save_cache(tmp_path / "talk.kv", talk, codec).result()
    assert saved.drafter == ("1 KV layers" if codec == "raw" else "the drafter starts cold")
    other = open_session(*uses)
    resumed = other.resume(tmp_path / "talk.kv").result()
    assert resumed.drafter == saved.drafter
    ids, cached = answer(other, salt=resumed.salt)
    assert cached == 64 and (codec != "raw" or ids == plain)
    planes = [s._state.engine.kv.stores[0].planes["k"][-1, 1:5] for s in (session, other)]
    assert torch.equal(*planes) == (codec == "raw")
    if codec == "raw":
        with pytest.raises(PayloadError, match="another drafter: 'draft_model:layers=1', not ''"):
            open_session(*PAGED).resume(tmp_path / "talk.kv").result()


def test_what_a_drafter_reads_behind_the_pages_comes_along(tmp_path, talk, answer):
    """The first row behind a resumed prefix reads the model's true state: the same rows, bit for bit."""
    limits = EngineLimits(kv_pool_tokens=1024, max_sequences=8, max_context=128)
    opened = {"dtype": "float64", "numerics": "pinned", "limits": limits}
    rows = []
    for name in ("saved", "resumed"):
        with Session("tiny", Recipe.of(*PAGED, "eagle3:depth=3"), **opened) as session:
            if name == "saved":
                saved = session.save_cache(tmp_path / "talk.kv", talk).result()
                assert saved.drafter == "1 KV layers"
            else:
                session.resume(tmp_path / "talk.kv").result()
            engine = session._state.engine
            ends = engine.kv.ends.of(engine.kv.index.lookup(talk, engine.kv.namespace, 64))
            assert list(ends) == [0, 1, 2, 3]
            assert answer(session, [*talk[:64], 9])[1] == 64
            plane = engine.kv.stores[0].planes["k"][-1]
            rows.append((torch.stack(list(ends.values())), plane[plane.abs().sum((1, 2, 3)) > 0]))
    assert all(torch.equal(a, b) for a, b in zip(*rows, strict=True))
    other = Recipe.of(*PAGED, "eagle:tree=chain")
    with (
        Session("tiny", other, **opened) as session,
        pytest.raises(PayloadError, match="another drafter: 'eagle3:depth=3'"),
    ):
        session.resume(tmp_path / "talk.kv").result()


def test_sliding_windows_keep_the_pages_they_still_see(model_folder, tmp_path, talk, answer):
    """Lossy codecs leave layers with a window alone; prompts may end anywhere in the first page they see."""
    limits = EngineLimits(kv_pool_tokens=1024, max_sequences=8, max_context=128)
    where = {"dtype": "float32", "limits": limits}
    for index, codec in (("radix_cache", "raw"), ("prefix_cache", LOSSY[0]), ("radix_cache", LOSSY[1])):
        recipe = Recipe.of("paged:page_size=16", index)
        with Session(str(model_folder("gemma3")), recipe, **where) as session:
            whole, shorter = answer(session)[0], answer(session, talk[:64])[0]
            session.save_cache(tmp_path / "talk.kv", talk, codec).result()
        with Session(str(model_folder("gemma3")), recipe, **where) as session:
            resumed = session.resume(tmp_path / "talk.kv").result()
            ids, cached = answer(session, salt=resumed.salt)
            assert cached == 64 and (codec != "raw" or ids == whole)
            ids, cached = answer(session, talk[:64], salt=resumed.salt)
            assert codec != "raw" or (ids == shorter and cached == 63)
            session._state.engine.kv.check()


# -- what must not be ----------------------------------------------------------------------------------
