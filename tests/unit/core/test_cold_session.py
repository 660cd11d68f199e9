"""Cold pages of a session: files go with it, a failing disk is a note of the run, toggling mixes nothing."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from workbench.core import kvtc_calibration
from workbench.engine.params import SamplingParams
from workbench.spec.errors import PlanError
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

LIMITS = EngineLimits(kv_pool_tokens=96, max_sequences=4, max_context=96)
FIRST, OTHER = [4 + i % 50 for i in range(72)], [52 - i % 47 for i in range(72)]
PLAIN = ("paged:page_size=16", "prefix_cache")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kvtc_calibration, "LENGTH", 64)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def said(session, ids):
    return session.submit(ids, SamplingParams(max_tokens=4, ignore_eos=True)).result()


def test_files_go_with_the_session_and_with_the_recipe(open_session, folder):
    session = open_session(*PLAIN, "kvtc:where=disk", limits=LIMITS)
    for ids in (FIRST, OTHER, FIRST):
        run = said(session, ids)
    assert run.outputs[0]["cached_tokens"] >= 48 and run.steps[-1]["cold"]["restored"] >= 3
    assert run.plan["kind"] == "lossy" and any(p.startswith("rest:kvtc") for p in run.path)
    assert len(list(folder.glob("workbench-cold-*/*.page"))) == run.steps[-1]["cold"]["pages"]
    session.apply(Recipe.of(*PLAIN)).result()
    assert not list(folder.glob("workbench-cold-*"))
    assert said(session, FIRST).outputs[0]["cached_tokens"] == 0
    session.apply(Recipe.of(*PLAIN, "kvtc:where=disk")).result()
    for ids in (FIRST, OTHER):
        assert said(session, ids).outputs[0]["cached_tokens"] == 0
    assert list(folder.glob("workbench-cold-*"))
    session.rest().result()
    assert not list(folder.glob("workbench-cold-*"))
    for ids in (FIRST, OTHER):
        said(session, ids)
    session.close()
    assert not list(folder.glob("workbench-cold-*"))


def test_a_failing_disk_is_a_note_of_the_run(open_session, monkeypatch):
    session = open_session(*PLAIN, "kvtc:where=disk", limits=LIMITS)
    said(session, FIRST)

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    run = said(session, OTHER)
    assert run.state == "done" and any("cold tier is off" in note for note in run.notes)
    assert not any("cold tier" in note for note in said(session, FIRST).notes)


def test_conflicts_have_remedies(open_session, model_folder):
    from workbench.core.session import Session

    with pytest.raises(PlanError, match="Prefix cache \\(hash chain\\) or Prefix cache"):
        open_session("paged", "kvtc")
    with pytest.raises(PlanError, match=r"switch off INT8 KV cache first"):
        open_session(*PLAIN, "kv_int8", "kvtc")
    with pytest.raises(PlanError, match=r"switch off CacheGen \(KV at rest\) first"):
        open_session(*PLAIN, "cachegen", "snapkv")
    with pytest.raises(PlanError, match="one way to keep KV at rest"):
        open_session(*PLAIN, "kvtc", "cachegen")
    with pytest.raises(PlanError, match="forget behind a window"):
        Session(str(model_folder("gemma3")), Recipe.of(*PLAIN, "kvtc"), dtype="float32")
