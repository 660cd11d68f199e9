"""The run store: finding runs again, several processes at once, and files that are damaged or foreign."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from workbench.records import store as module
from workbench.records.store import RunStore, default_path
from workbench.spec.errors import RecordError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

Make = Callable[..., Run]


def test_what_is_saved_is_found_again(make_run: Make, store_path: Path) -> None:
    run = make_run()
    store = RunStore(store_path)
    assert store.save(run, label="mine") == run.id
    assert RunStore(store_path).get(run.id) == run
    assert store.get(run.id[:6]) == run
    assert store.last() == run
    assert len(store) == 1
    (row,) = store.list()
    assert (row.id, row.label, row.recipe, row.created) == (
        run.id,
        "mine",
        "paged + kivi:bits=2",
        run.provenance.created,
    )


def test_saving_twice_keeps_one(make_run: Make, store_path: Path) -> None:
    store = RunStore(store_path)
    store.save(make_run())
    store.save(make_run(seed=9))
    assert len(store) == 1 and store.get("a").seed == 9


def test_lists_are_filtered_newest_first_and_limited(make_run: Make, store_path: Path) -> None:
    store = RunStore(store_path)
    plain = Recipe()
    store.save(make_run("1" * 32, model="one"), label="x")
    store.save(make_run("2" * 32, kind="measure", recipe=[], recipe_key=plain.key))
    store.save(make_run("3" * 32, recipe=[{"id": "kv_int8"}], recipe_key="k8"))
    ids = lambda **filters: [r.id[0] for r in store.list(**filters)]  # noqa: E731
    assert ids() == ["3", "2", "1"]
    assert ids(limit=2) == ["3", "2"]
    assert ids(model="one") == ["1"] and ids(kind="measure") == ["2"] and ids(label="x") == ["1"]
    assert ids(recipe=plain) == ["2"] and ids(recipe="k8") == ["3"]
    assert ids(recipe="kivi") == ["1"] and ids(recipe="kv_int8") == ["3"]
    assert ids(recipe="kvXint8") == [] and ids(recipe="%") == []
    assert store.last(kind="measure").id == "2" * 32 and store.last(model="none") is None


def test_a_hostile_filter_is_only_text(make_run: Make, store_path: Path) -> None:
    store = RunStore(store_path)
    store.save(make_run(model="it's; DROP TABLE runs"))
    assert store.list(model="'; DROP TABLE runs; --") == ()
    assert len(store.list(model="it's; DROP TABLE runs")) == 1


def test_ids_that_are_unknown_or_ambiguous_are_refused(make_run: Make, store_path: Path) -> None:
    store = RunStore(store_path)
    store.save(make_run("abc1" + "0" * 28))
    store.save(make_run("abc2" + "0" * 28))
    for prefix, says in (("abc", "several"), ("x", "No run"), ("", "No run id")):
        with pytest.raises(RecordError, match=says):
            store.get(prefix)
    assert store.delete("abc1") == "abc1" + "0" * 28
    assert store.get("abc").id.startswith("abc2")


def test_the_path_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path))
    assert default_path() == tmp_path / "runs.db"
    monkeypatch.setenv("WORKBENCH_RUNS", str(tmp_path / "my.sqlite"))
    assert RunStore().path == tmp_path / "my.sqlite"
    monkeypatch.delenv("WORKBENCH_RUNS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert default_path() == tmp_path / "data" / "inference-workbench" / "runs.db"


def test_prompts_are_private(make_run: Make, store_path: Path) -> None:
    RunStore(store_path).save(make_run())
    assert store_path.stat().st_mode & 0o077 == 0


WRITER = """
import sys
from dataclasses import replace
from workbench.records.runfile import loads
from workbench.records.store import RunStore
run = loads(sys.stdin.read())
store = RunStore(sys.argv[1])
for i in range(15):
    store.save(replace(run, id=f"{sys.argv[2]}{i:031d}"))
    store.list()
"""


def test_processes_write_at_the_same_time(make_run: Make, store_path: Path) -> None:
    from workbench.records.runfile import dumps

    text = dumps(make_run())
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(store_path), name], stdin=subprocess.PIPE, text=True
        )
        for name in "abcd"
    ]
    for w in writers:
        w.stdin.write(text)
        w.stdin.close()
    assert [w.wait(120) for w in writers] == [0] * 4
    assert len(RunStore(store_path)) == 60
    with closing(sqlite3.connect(store_path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_threads_share_one_store(make_run: Make, store_path: Path) -> None:
    store, failed = RunStore(store_path), []

    def work(name: str) -> None:
        try:
            for i in range(10):
                store.get(store.save(make_run(f"{name}{i:031d}", steps=0)))
        except Exception as err:
            failed.append(err)

    threads = [threading.Thread(target=work, args=(n,)) for n in "abc"]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert failed == [] and len(store) == 30


@pytest.mark.parametrize("content", [b"not a database at all " * 200, b"SQLite format 3\0" + b"\xff" * 4096])
def test_bad_input_corrupted_run_store_is_moved_aside(
    make_run: Make, store_path: Path, content: bytes
) -> None:
    store_path.parent.mkdir()
    store_path.write_bytes(content)
    with pytest.raises(RecordError) as caught:
        RunStore(store_path)
    (aside,) = store_path.parent.glob("runs.db.corrupt-*")
    assert aside.read_bytes() == content
    assert str(aside) in str(caught.value) and "new store" in str(caught.value)
    assert RunStore(store_path).save(make_run()) == "a" * 32


def test_a_store_damaged_while_open_is_moved_aside_with_its_journal(make_run: Make, store_path: Path) -> None:
    store = RunStore(store_path)
    store.save(make_run())
    size = store_path.stat().st_size
    store_path.write_bytes(b"\0" * size)
    with pytest.raises(RecordError, match="moved to"):
        store.list()
    assert store.list() == () and store.save(make_run())
    (aside,) = [
        p for p in store_path.parent.glob("runs.db.corrupt-*") if not p.name.endswith(("-wal", "-shm"))
    ]
    assert aside.stat().st_size == size


def test_one_unreadable_run_does_not_hide_the_others(make_run: Make, store_path: Path) -> None:
    store = RunStore(store_path)
    store.save(make_run("1" * 32))
    store.save(make_run("2" * 32))
    with closing(sqlite3.connect(store_path)) as db, db:
        db.execute("UPDATE runs SET payload = '{' WHERE id LIKE '1%'")
    with pytest.raises(RecordError, match="1111"):
        store.get("1")
    assert store.get("2").id == "2" * 32 and len(store.list()) == 2


def test_a_store_that_was_deleted_begins_again(make_run: Make, store_path: Path) -> None:
    store = RunStore(store_path)
    store.save(make_run())
    for part in store_path.parent.glob("runs.db*"):
        part.unlink()
    assert store.list() == () and store.save(make_run())


def test_another_programs_database_is_left_alone(store_path: Path) -> None:
    store_path.parent.mkdir()
    with closing(sqlite3.connect(store_path)) as db, db:
        db.execute("CREATE TABLE theirs (x)")
    before = store_path.read_bytes()
    with pytest.raises(RecordError, match="left alone"):
        RunStore(store_path)
    assert store_path.read_bytes() == before


def test_a_store_of_a_newer_version_is_left_alone(make_run: Make, store_path: Path) -> None:
    RunStore(store_path).save(make_run())
    with closing(sqlite3.connect(store_path)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(RecordError, match="newer version"):
        RunStore(store_path)


def test_an_older_store_is_migrated_and_keeps_its_runs(
    make_run: Make, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunStore(store_path).save(make_run())
    later = (*module.MIGRATIONS, ("ALTER TABLE runs ADD COLUMN stars INTEGER NOT NULL DEFAULT 0",))
    monkeypatch.setattr(module, "MIGRATIONS", later)
    assert RunStore(store_path).get("a") == make_run()
    with closing(sqlite3.connect(store_path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(later),)
        assert db.execute("SELECT stars FROM runs").fetchone() == (0,)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="WORKBENCH_RUNS"):
        RunStore(tmp_path / "file" / "runs.db")


def test_a_folder_that_takes_no_lock_file_is_a_record_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.1)
    (tmp_path / "runs.db.lock").mkdir()  # as good as read-only, also for root
    with pytest.raises(RecordError, match=r"cannot be used.*WORKBENCH_RUNS"):
        RunStore(tmp_path / "runs.db")


def test_a_bench_run_is_listed_and_found_by_all_that_competed(make_run: Make, store_path: Path) -> None:
    bench = {"name": "decode", "rounds": 7, "cells": {}, "contestants": ["plain", "paged+ngram:k=3"]}
    run = make_run(kind="bench", recipe=[], plan={"kind": "exact", "bench": bench})
    store = RunStore(store_path)
    store.save(run)
    (listed,) = store.list(recipe="ngram")
    assert listed.recipe == "decode: plain vs paged+ngram:k=3"
    old = make_run(id="b" * 32, kind="bench", plan={"bench": {"name": "decode"}})
    assert old.subject == "paged + kivi:bits=2"  # stored before contestants were


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nothing can be made")
def test_a_place_where_no_file_can_be_made_is_refused_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def waits(*_: object, **__: object) -> None:
        raise AssertionError("the lock was waited for")

    monkeypatch.setattr(module, "FileLock", waits)
    with pytest.raises(RecordError, match=r"/proc/x\.db cannot be used: No such file") as caught:
        RunStore("/proc/x.db")
    assert "WORKBENCH_RUNS" in caught.value.hint


def test_what_is_no_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs.db").mkdir()
    with pytest.raises(RecordError, match="no regular file"):
        RunStore(tmp_path / "runs.db")
    assert [p.name for p in tmp_path.iterdir()] == ["runs.db"]
