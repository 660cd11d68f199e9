"""Conversations saved and resumed: exact ones bit for bit, lossy ones for those who ask, hostile ones never."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from workbench.core import kvtc_calibration
from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.spec.errors import (
    CapacityError,
    OptionError,
    PayloadError,
    RecipeError,
    RequestError,
    SessionClosed,
    StorageError,
)
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

IDS = [4 + (7 * i) % 50 for i in range(75)]
PAGED = ("paged:page_size=16", "prefix_cache")
LOSSY = ("kvtc:k_ratio=4,v_ratio=4,window=16", "cachegen:level=64/64/64")


@pytest.fixture(scope="module", autouse=True)
def _calibrations(tmp_path_factory):
    """One cache folder for the module, with short calibration sequences."""
    patch = pytest.MonkeyPatch()
    patch.setenv("WORKBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
    patch.setattr(kvtc_calibration, "LENGTH", 64)
    yield
    patch.undo()


def answer(session: Session, ids=IDS, salt: str = "", tokens: int = 6):
    run = session.submit(ids, SamplingParams(max_tokens=tokens), salt=salt).result()
    return run.token_ids, run.outputs[0]["cached_tokens"]


@pytest.mark.parametrize("index", ["prefix_cache", "radix_cache"])
@pytest.mark.parametrize("format", [None, "kv_int8", "kivi:residual=32", "kv_fp8"])
def test_raw_comes_back_exactly_whatever_the_format(open_session, tmp_path, index, format):
    uses = ["paged:page_size=32", index, *([format] if format else [])]
    first = open_session(*uses)
    expected = answer(first)
    saved = first.save_cache(tmp_path / "talk.kv", IDS).result()
    assert (saved.tokens, saved.cached, saved.lossy, saved.drafter) == (75, 64, False, "")
    assert saved.file_bytes == (tmp_path / "talk.kv").stat().st_size > saved.kv_bytes > 0
    assert answer(first)[0] == expected[0]
    second = open_session(*uses)
    resumed = second.resume(tmp_path / "talk.kv").result()
    assert (list(resumed.ids), resumed.cached, resumed.salt, resumed.lossy) == (IDS, 64, "", False)
    assert answer(second) == (expected[0], 64)
    second._state.engine.kv.check()


@pytest.mark.parametrize("codec", LOSSY)
def test_lossy_conversations_serve_only_who_passes_their_salt(open_session, tmp_path, codec):
    session = open_session(*PAGED)
    plain, _ = answer(session)
    saved = session.save_cache(tmp_path / "talk.kv", IDS, codec).result()
    assert saved.lossy and saved.codec == codec
    other = open_session(*PAGED)
    resumed = other.resume(tmp_path / "talk.kv").result()
    assert resumed.lossy and resumed.salt
    assert answer(other) == (plain, 0)
    ids, cached = answer(other, salt=resumed.salt)
    assert cached == 64 and len(ids) == 6
    assert answer(other, salt=resumed.salt + "x") == (plain, 0)
