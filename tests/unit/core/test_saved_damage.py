"""Saved conversations that are damaged, foreign, too large or interrupted: refused by name, nothing lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.core import saved_cache
from workbench.core.saved_file import KIND, VERSION
from workbench.core.session import Session
from workbench.engine.params import SamplingParams
from workbench.kv.container import read_payload, write_payload
from workbench.spec.errors import (
    Cancelled,
    CapacityError,
    OptionError,
    PayloadError,
    RecipeError,
    RequestError,
    SessionClosed,
    StorageError,
    UnsupportedInput,
)
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

pytestmark = pytest.mark.usefixtures("short_calibrations")
PAGED = ("paged:page_size=16", "prefix_cache")
LOSSY = ("kvtc:k_ratio=4,v_ratio=4,window=16", "cachegen:level=64/64/64")


@pytest.fixture
def saved(open_session, tmp_path, talk) -> Path:
    path = tmp_path / "talk.kv"
    open_session(*PAGED).save_cache(path, talk).result()
    return path


def untouched(session: Session) -> bool:
    """Nothing was published and no page is held."""
    kv = session._state.engine.kv
    kv.check()
    return len(kv.index) == 0 and all(pool.used == 0 and pool.cached == 0 for pool in kv.pools)


def test_damage_is_named_with_its_place_and_changes_nothing(open_session, saved, answer):
    session, data = open_session(*PAGED), saved.read_bytes()
    session.generate("x", max_tokens=1)
    assert untouched(session)
    head = int.from_bytes(data[14:18], "little") + 32
    for what, bad in {
        "only": data[:20],
        "here": data[:-1],
        "bytes": data + b"x",
        "mark": b"PK" + data[2:],
        "header": data[: head - 9] + b"?" + data[head - 8 :],
        "'ids'": data[: head + 1] + bytes([data[head + 1] ^ 1]) + data[head + 2 :],
        "0.v": data[:-1] + bytes([data[-1] ^ 1]),
        "version": data[:12] + bytes([VERSION + 1]) + data[13:],
    }.items():
        saved.write_bytes(bad)
        with pytest.raises(PayloadError, match=r"talk\.kv") as caught:
            session.resume(saved).result()
        assert what in str(caught.value) or what == "version", (what, caught.value)
        assert caught.value.hint and untouched(session)
    assert answer(session)[1] == 0


@pytest.mark.parametrize("codec", ["raw", *LOSSY])
def test_no_flipped_byte_and_no_cut_gets_through(open_session, tmp_path, codec, talk):
    path, session = tmp_path / "talk.kv", open_session(*PAGED)
    session.save_cache(path, talk, codec).result()
    session, data = open_session(*PAGED), path.read_bytes()
    session.generate("x", max_tokens=1)
    rng = np.random.default_rng(0)
    for i in range(40):
        at = int(rng.integers(0, len(data)))
        bad = data[:at] if i % 4 == 0 else data[:at] + bytes([data[at] ^ (1 << i % 8)]) + data[at + 1 :]
        path.write_bytes(bad)
        with pytest.raises(PayloadError):
            session.resume(path).result()
    assert untouched(session)


def test_files_that_are_none_are_refused(open_session, tmp_path):
    session = open_session(*PAGED)
    with pytest.raises(PayloadError, match="cannot be read: No such file"):
        session.resume(tmp_path / "absent.kv").result()
    with pytest.raises(PayloadError, match="no file"):
        session.resume(tmp_path).result()


@pytest.mark.parametrize(
    ("uses", "where", "words"),
    [
        (("paged:page_size=32", "prefix_cache"), {}, "page size"),
        ((*PAGED, "kv_int8"), {}, "KV format"),
        ((*PAGED, "rtn"), {}, "weight format"),
        (PAGED, {"dtype": "bfloat16"}, "dtype"),
        (PAGED, {"numerics": "pinned"}, "numerics"),
    ],
)
def test_what_shaped_the_rows_otherwise_is_named(open_session, saved, uses, where, words):
    session = open_session(*uses, **where)
    with pytest.raises(PayloadError, match=f"another {words}") as caught:
        session.resume(saved).result()
    assert "model" in caught.value.hint and untouched(session)


def test_another_model_is_refused(model_folder, saved):
    with Session(str(model_folder("qwen3")), Recipe.of(*PAGED), dtype="float32") as session:
        with pytest.raises(PayloadError, match="another weights"):
            session.resume(saved).result()
        assert untouched(session)


def test_a_conversation_longer_than_the_context_is_refused(open_session, saved, talk):
    limits = EngineLimits(kv_pool_tokens=1024, max_sequences=8, max_context=48)
    with pytest.raises(PayloadError, match="context limit is 48"):
        open_session(*PAGED, limits=limits).resume(saved).result()
    limits = EngineLimits(kv_pool_tokens=32, max_sequences=8, max_context=128)
    small = open_session(*PAGED, limits=limits)
    with pytest.raises(CapacityError, match="kv_pool_tokens"):
        small.resume(saved).result()
    with pytest.raises(CapacityError, match="kv_pool_tokens"):
        small.save_cache(saved, talk).result()
    assert untouched(small)


def test_codecs_that_are_not_calibrated_here_say_so(open_session, tmp_path, monkeypatch, talk):
    path = tmp_path / "talk.kv"
    open_session(*PAGED).save_cache(path, talk, LOSSY[0]).result()
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "elsewhere"))
    session = open_session(*PAGED)
    with pytest.raises(PayloadError, match="not calibrated for kvtc") as caught:
        session.resume(path).result()
    assert "save a conversation" in caught.value.hint and untouched(session)


def forged(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header, checksums and all."""
    payload = read_payload(path.read_bytes(), KIND, VERSION)
    header = payload.header
    change(header)
    path.write_bytes(write_payload(KIND, VERSION, header, payload.streams))


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(tokens=10**15),
        lambda h: h.update(cached=10**15, tokens=10**15),
        lambda h: h.update(cached=63),
        lambda h: h.update(cached=-16),
        lambda h: h.update(cached=0),
        lambda h: h.update(tokens=True),
        lambda h: h.update(shaped=[]),
        lambda h: h["shaped"].update(page_size=0),
        lambda h: h.update(codec={"id": "rtn"}),
        lambda h: h.update(codec={"id": "kvtc", "k_ratio": -1}, codec_key="x", lossy=True),
        lambda h: h.update(codec={"id": "raw"}, codec_key="raw/2"),
        lambda h: h.update(pages={}),
        lambda h: h.pop("salt"),
        lambda h: h.update(salt=7),
        lambda h: h.update(salt="\udcff"),
    ],
)
def test_forged_headers_are_refused(open_session, saved, change):
    session = open_session(*PAGED)
    forged(saved, change)
    with pytest.raises(PayloadError, match=r"talk\.kv|stored pages"):
        session.resume(saved).result()
    assert untouched(session)


def test_ids_that_the_model_lacks_are_refused(open_session, saved):
    payload = read_payload(saved.read_bytes(), KIND, VERSION)
    streams = {**payload.streams, "ids": np.full(75, -1, "<i4").tobytes()}
    saved.write_bytes(write_payload(KIND, VERSION, payload.header, streams))
    with pytest.raises(PayloadError, match="token ids"):
        open_session(*PAGED).resume(saved).result()


def test_a_body_that_its_tokens_do_not_explain_is_not_read(open_session, saved):
    payload = read_payload(saved.read_bytes(), KIND, VERSION)
    streams = {**payload.streams, "more": bytes(4 << 20)}
    saved.write_bytes(write_payload(KIND, VERSION, payload.header, streams))
    with pytest.raises(PayloadError, match="explain"):
        open_session(*PAGED).resume(saved).result()


def test_without_a_prefix_index_the_way_out_is_named(open_session, saved):
    with pytest.raises(RequestError, match="prefix index") as caught:
        open_session("paged").resume(saved).result()
    assert "radix_cache" in caught.value.hint


def test_what_cannot_be_saved_is_refused_at_once(open_session, tmp_path, talk):
    session, path = open_session(*PAGED, "kv_int8"), tmp_path / "talk.kv"
    with pytest.raises(RecipeError, match="stores no conversations"):
        session.save_cache(path, talk, "rtn")
    with pytest.raises(OptionError, match="k_ratio"):
        session.save_cache(path, talk, "kvtc:k_ratio=0")
    with pytest.raises(RecipeError, match="no options"):
        session.save_cache(path, talk, "raw:level=3")
    with pytest.raises(RequestError, match="no page"):
        session.save_cache(path, talk[:15]).result()
    with pytest.raises(UnsupportedInput, match="int8"):
        session.save_cache(path, talk, LOSSY[0]).result()
    assert not list(tmp_path.iterdir())
    session.close()
    with pytest.raises(SessionClosed):
        session.save_cache(path, talk)


def test_a_full_disk_leaves_no_file_and_the_older_one_as_it_was(open_session, saved, monkeypatch, talk):
    session, before = open_session(*PAGED), saved.read_bytes()

    class Full:
        def __init__(self, handle: int, mode: str) -> None:
            os.close(handle)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *exc: object) -> None:
            pass

        def write(self, data: memoryview) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("workbench.core.saved_file.os.fdopen", Full)
    with pytest.raises(StorageError, match="No space left"):
        session.save_cache(saved, talk).result()
    monkeypatch.undo()
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]
    with pytest.raises(StorageError, match="There is no folder"):
        session.save_cache(saved.parent / "no" / "folder.kv", talk).result()


@pytest.mark.parametrize("where", ["computing the conversation", "reading cached pages", "writing the file"])
def test_cancelling_half_way_leaves_no_file_and_no_page(open_session, tmp_path, monkeypatch, where, talk):
    monkeypatch.setattr(saved_cache, "PREFILL", 16)
    session, seen = open_session(*PAGED), []

    def listen(event: Any) -> None:
        if getattr(event, "message", "") == where and event.state == "running":
            seen.append(event)
            job.cancel()

    session.listen(listen)
    job = session.save_cache(tmp_path / "talk.kv", talk)
    try:
        job.result(60)
    except Cancelled:
        assert not list(tmp_path.iterdir())
    else:  # the last progress of all comes when the file is complete
        assert where == "writing the file"
    assert seen
    kv = session._state.engine.kv
    kv.check()
    assert all(pool.used == 0 for pool in kv.pools)


def test_cancelling_a_resume_changes_nothing(open_session, saved):
    session = open_session(*PAGED)

    def listen(event: Any) -> None:
        if getattr(event, "message", "") == "file read and checked":
            job.cancel()

    session.listen(listen)
    job = session.resume(saved)
    with pytest.raises(Cancelled):
        job.result(60)
    assert untouched(session)


def test_two_sessions_save_and_resume_one_file(open_session, tmp_path, talk, answer):
    path, sessions = tmp_path / "talk.kv", [open_session(*PAGED) for _ in range(2)]
    for job in [s.save_cache(path, talk) for s in sessions for _ in range(3)]:
        job.result()
    assert list(tmp_path.iterdir()) == [path]
    for job in [s.resume(path) for s in sessions for _ in range(2)]:
        assert job.result().cached == 64
    assert answer(sessions[0]) == answer(sessions[1])


def test_resuming_beside_running_requests_waits_for_pages(open_session, saved):
    limits = EngineLimits(kv_pool_tokens=112, max_sequences=4, max_context=112)
    session = open_session(*PAGED, limits=limits)
    running = session.submit([9] * 40, SamplingParams(max_tokens=30, ignore_eos=True))
    resumed = session.resume(saved).result(120)
    assert running.result(120).state == "done" and resumed.cached == 64
    session._state.engine.kv.check()
