"""The cold tier in an engine: what it codes and when, what failing stores do to it, what is counted."""

from __future__ import annotations

import errno
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from workbench.engine.engine import Engine
from workbench.kv.cold_store import DiskStore
from workbench.spec.errors import StorageError

FIRST = [3 + i % 50 for i in range(72)]
OTHER = [50 - i % 47 for i in range(72)]


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WORKBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def make(lab: ModuleType, codec: str = "kvtc:k_ratio=4,v_ratio=4", index: str = "prefix_cache") -> Engine:
    return lab.make_engine("paged", index, codec, pool=96, page_size=16, dtype="float32", numerics="fast")


def run(lab: ModuleType, engine: Engine, prompt: list[int] = FIRST, **kwargs: Any) -> Any:
    return lab.run_engine(engine, [prompt], max_tokens=4, **kwargs)


@pytest.mark.parametrize("index", ["prefix_cache", "radix_cache"])
@pytest.mark.parametrize("codec", ["kvtc:k_ratio=4,v_ratio=4", "cachegen", "kvtc:where=disk"])
def test_pages_given_up_come_back_on_a_later_prompt(lab: ModuleType, codec: str, index: str) -> None:
    engine = make(lab, codec, index)
    cold = run(lab, engine)
    assert cold.cached() == 0 and engine.kv.cold.tier.counts.stored == 0
    run(lab, engine, OTHER)
    stored = dict(run(lab, engine, OTHER).steps[-1].cold)
    assert stored["stored"] >= 3 and stored["pages"] == stored["stored"] and stored["bytes"] > 0
    shown = engine.memory()
    assert (shown["kv_cold"] == 0) == ("disk" in codec) and shown["calibration"] > 0
    warm = run(lab, engine, [*FIRST, 7, 8])
    back = warm.steps[-1].cold["restored"]
    assert back >= 3 and warm.cached() >= back * 16
    assert any(p.startswith(f"rest:{codec[:4]}") for p in warm.steps[-1].path)
    engine.kv.check()
    engine.kv.close()
    assert engine.kv.cold.tier.held == 0


def test_a_page_that_came_back_is_not_coded_again(lab: ModuleType) -> None:
    """The tier still has it; once it does not, coding what lost already would lose twice."""
    engine = make(lab)
    tier = engine.kv.cold.tier
    run(lab, engine)
    for _ in range(3):
        run(lab, engine, OTHER)
        run(lab, engine)
    assert tier.counts.restored >= 3 and tier.counts.stored <= 2 * 4
    tier.clear()
    run(lab, engine, OTHER[::-1])
    assert tier.counts.skipped >= 3 and tier.counts.missed == 0


def test_rows_that_come_back_are_the_codec_s_round_trip_of_exact_rows(lab: ModuleType) -> None:
    engine = make(lab)
    run(lab, engine)
    planes = engine.kv.stores[0].planes["k"]
    before = {tuple(e.tokens): planes[:, e.pages[0]].clone() for e in _entries(engine)}
    run(lab, engine, OTHER)
    run(lab, engine, OTHER[::-1])
    run(lab, engine)
    tier, after = engine.kv.cold.tier, {tuple(e.tokens): planes[:, e.pages[0]] for e in _entries(engine)}
    assert tier.counts.restored == 4
    first = tuple(FIRST[:16])
    assert torch.equal(after[first][:, :, :4], before[first][:, :, :4].half().float())  # sinks
    for i in range(1, 4):
        page = tuple(FIRST[16 * i : 16 * i + 16])
        error = (after[page] - before[page]).norm() / before[page].norm()
        assert 0 < error < 0.5


def _entries(engine: Engine) -> list[Any]:
    return [e for bucket in engine.kv.index._by_digest.values() for e in bucket]


def test_namespaces_hold_codec_calibration_and_ratio(lab: ModuleType) -> None:
    spaces = {make(lab, c).kv.namespace for c in ("kvtc", "kvtc:k_ratio=8", "cachegen", "kvtc:sinks=0")}
    plain = lab.make_engine(
        "paged", "prefix_cache", page_size=16, dtype="float32", numerics="fast"
    ).kv.namespace
    assert len(spaces | {plain}) == 5
    assert make(lab, "kvtc:where=disk,limit=3").kv.namespace in spaces


def test_salts_keep_cold_pages_apart(lab: ModuleType) -> None:
    engine = make(lab)
    run(lab, engine, salt="a")
    run(lab, engine, OTHER)
    assert run(lab, engine, salt="b").cached() == 0
    assert engine.kv.cold.tier.counts.restored == 0


@pytest.mark.parametrize("what", ["write_bytes", "read_bytes"])
def test_a_failing_disk_ends_the_tier_with_one_warning_not_the_run(
    lab: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str, _cache: Path
) -> None:
    engine = make(lab, "kvtc:where=disk")
    expected = run(lab, engine).ids()
    if what == "read_bytes":
        run(lab, engine, OTHER)

    def fail(self: Path, *args: object) -> None:
        raise OSError(errno.EIO if what == "read_bytes" else errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, what, fail)
    made = [run(lab, engine, p) for p in (OTHER, FIRST, OTHER)]
    monkeypatch.undo()
    warnings = [w for ran in made for s in ran.steps for w in s.warnings]
    assert len(warnings) == 1 and "cold tier is off" in warnings[0] and "No space left" in warnings[0]
    assert all(ran.finish() == "length" for ran in made)
    assert made[1].ids() == expected and not engine.kv.cold.tier.alive
    assert not list(_cache.glob("workbench-cold-*"))
    engine.kv.check()


def test_a_damaged_or_lost_page_is_computed_again(lab: ModuleType, _cache: Path) -> None:
    engine = make(lab, "kvtc:where=disk")
    expected = run(lab, engine).ids()
    run(lab, engine, OTHER)
    files = sorted(_cache.glob("workbench-cold-*/*.page"))
    assert files
    files[0].unlink()
    for path in files[1:]:
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert run(lab, engine).ids() == expected
    tier = engine.kv.cold.tier
    assert tier.counts.missed == 1 and tier.counts.restored == 0 and tier.alive
    engine.kv.close()
    engine.kv.close()
    assert not list(_cache.glob("workbench-cold-*"))


def test_files_go_with_the_store_that_nobody_holds(_cache: Path) -> None:
    from workbench.engine.at_rest import Coded

    store = DiskStore()
    store.put(1, Coded({}, {"x": b"abc"}))
    assert bytes(store.get(1).streams["x"]) == b"abc" and len(list(_cache.glob("workbench-cold-*"))) == 1
    del store
    assert not list(_cache.glob("workbench-cold-*"))
    closed = DiskStore()
    closed.close()
    with pytest.raises(StorageError):
        closed.put(1, Coded({}, {}))


@pytest.mark.parametrize("index", ["prefix_cache", "radix_cache"])
def test_it_works_beside_drafts_chunks_samples_and_preemption(lab: ModuleType, index: str) -> None:
    """Everything that moves pages at once, on a pool too small for all of it."""
    engine = lab.make_engine(
        "paged",
        index,
        "chunked_prefill:budget=32",
        "ngram",
        "kvtc:k_ratio=4,v_ratio=4",
        pool=160,
        page_size=16,
        dtype="float32",
        numerics="fast",
    )
    prompts = [FIRST, OTHER, FIRST[:40], [*FIRST, 9, 9], OTHER[:50]]
    for _ in range(3):
        ran = lab.run_engine(engine, prompts, max_tokens=12, ignore_eos=True, n=2, temperature=0.5)
        assert all(len(ran.ids(f"r{i}", s)) == 12 for i in range(5) for s in range(2))
        engine.kv.check()
        assert engine.kv.pools[0].used == 0
    counts = engine.kv.cold.tier.counts
    assert counts.stored > 0 and counts.restored > 0 and counts.missed == 0
    tier = engine.kv.cold.tier
    assert tier.held == sum(node.nbytes for _, node in tier._used.values()) == tier.store.memory
