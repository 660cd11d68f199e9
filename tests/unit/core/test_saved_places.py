"""Saving to odd places and what is no conversation: refused before anything is computed or replaced."""

from __future__ import annotations

import os
import stat

import pytest

from workbench.spec.errors import PromptTooLong, RecipeError, StorageError, UnknownToken

IDS = [4 + (7 * i) % 50 for i in range(40)]
PAGED = ("paged:page_size=16", "prefix_cache")


def test_what_is_no_ordinary_file_stays_in_its_place(open_session, tmp_path):
    session = open_session(*PAGED)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(StorageError, match="no ordinary file"):
        session.save_cache(pipe, IDS).result()
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(StorageError, match="no ordinary file"):
        session.save_cache(tmp_path, IDS).result()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_a_missing_folder_is_named_before_the_work(open_session, tmp_path):
    session = open_session(*PAGED)
    with pytest.raises(StorageError, match="There is no folder"):
        session.save_cache(tmp_path / "none" / "talk.kv", IDS).result()
    assert session._state.engine.kv.pools[0].cached == 0  # nothing was computed


@pytest.mark.parametrize("name", ["", "a\0b", 5, None])
def test_what_names_no_file_is_refused_at_once(open_session, name):
    session = open_session(*PAGED)
    with pytest.raises(StorageError, match="names no file"):
        session.save_cache(name, IDS)
    with pytest.raises(StorageError, match="names no file"):
        session.resume(name)


def test_ids_and_codecs_that_do_not_exist_and_more_than_the_context(open_session, tmp_path):
    session = open_session(*PAGED)
    path = tmp_path / "talk.kv"
    for bad in (-1, 10**6):
        with pytest.raises(UnknownToken, match=f"Token id {bad} "):
            session.save_cache(path, [*IDS, bad]).result()
    with pytest.raises(PromptTooLong, match="context limit"):
        session.save_cache(path, IDS * 1000).result()
    with pytest.raises(RecipeError, match="None stores no conversations"):
        session.save_cache(path, IDS, None)
    assert not list(tmp_path.iterdir())
    assert session.save_cache(path, IDS).result().cached == 32
