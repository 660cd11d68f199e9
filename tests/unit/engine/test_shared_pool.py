"""One page pool for KV groups with pages of one size: what a window gives back serves the others."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from workbench.core import kv_groups
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.engine.snapshot import page_snapshot
from workbench.spec.errors import CapacityError

pytestmark = pytest.mark.usefixtures("inference")

PAGE, WINDOW = 4, 24
KIVI = "kivi:residual=32,group=32"
KV = ("kv_payload", "kv_meta", "fragmentation", "kv_cached", "kv_free")
TYPES = {
    "uneven": ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
    "mostly": ["sliding_attention"] * 5 + ["full_attention"],
}


@pytest.fixture
def engine_of(lab: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """Engines on models with more layers that have a window than layers that have none."""
    for name, types in TYPES.items():
        shape = {**lab.FAMILIES["gemma3"], "num_hidden_layers": len(types), "layer_types": types}
        monkeypatch.setitem(lab.FAMILIES, name, shape)

    def make(*uses: str, family: str = "mostly", pages: int = 64, **kwargs: Any) -> Engine:
        size = PAGE if KIVI not in uses else 0
        made: Engine = lab.make_engine(
            "paged",
            *uses,
            family=family,
            page_size=size,
            pool=pages * (size or 32),
            dtype="float32",
            **kwargs,
        )
        return made

    return make


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on each KV group, whole, has a pool of its own."""
    return lambda: monkeypatch.setattr(kv_groups, "_alike", lambda plan, config: False)


def most_at_once(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[int, dict[str, list[int]]]:
    """Sequences that ran at the same time, at most, and what all of them said."""
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        engine.add(Request(f"r{i}", tuple(prompt), params))
    most, said = 0, dict[str, list[int]]()
    while engine.has_work:
        step, events = engine.step()
        engine.kv.check()
        most = max(most, step.running)
        for e in events:
            said.setdefault(e.request_id, []).extend(t.id for t in e.tokens)
    return most, said


@pytest.mark.parametrize("budget", [0, 16])
def test_more_sequences_run_at_once_in_a_pool_of_the_same_bytes(lab, engine_of, apart, budget):
    prompts = lab.prompts_of(4, seed=5, low=100, high=101)
    shared = engine_of(pages=40, budget=budget)
    apart()
    separate = engine_of(pages=40, budget=budget)
    assert len(shared.kv.each_pool) == 1 and len(separate.kv.each_pool) == 2
    mine, theirs = (sum(e.memory()[c] for c in KV) for e in (shared, separate))
    assert mine <= theirs * 1.01
    (many, said), (few, expected) = (most_at_once(e, prompts, 20) for e in (shared, separate))
    assert said == expected
    assert few == 1 and many >= (3 if budget else 2)


def test_a_prompt_in_chunks_needs_no_more_pages_than_its_windows_see(lab, engine_of):
    """A pool of a third of the prompt's slots in every group holds it, to the token."""
    prompt = lab.prompts_of(1, seed=9, low=200, high=201)[0]
    whole = lab.run_engine(engine_of(pages=64), [prompt], max_tokens=8).ids()
    small = engine_of(pages=18, budget=8)
    assert lab.run_engine(small, [prompt], max_tokens=8).ids() == whole
    small.kv.check()
    assert small.kv.pools[0].used == 0
    at_once = engine_of(pages=18)
    with pytest.raises(CapacityError, match=r"52 pages of 4.* in each of 6 KV groups"):
        at_once.add(Request("a", tuple(prompt), SamplingParams(max_tokens=8)))


def test_a_sequence_that_just_fits_is_computed_though_it_is_cut_short_of_pages(lab, engine_of):
    """The smallest pool that takes a request serves it, whatever the block, from any prefix on."""
    prompt = lab.prompts_of(1, seed=3, low=90, high=91)[0]
    expected = lab.run_engine(engine_of(), [prompt], max_tokens=5).ids()
    for budget in (1, 4, 11, 64):
        for pages in range(8, 40):
            engine = engine_of("prefix_cache", pages=pages, budget=budget)
            if not engine.kv.fits(94, budget):
                continue
            for n in (90, 61):
                engine.add(Request("a", tuple(prompt[:n]), SamplingParams(max_tokens=5, ignore_eos=True)))
                said: list[int] = []
                for _ in range(400):
                    if not engine.has_work:
                        break
                    said += [t.id for e in engine.step()[1] for t in e.tokens]
                assert not engine.has_work and (n == 61 or said == expected)
            break
        else:
            pytest.fail("no pool was large enough")


@pytest.mark.parametrize("uses", [(), ("prefix_cache",), ("radix_cache",), (KIVI,)])
def test_preemption_in_a_shared_pool_changes_no_output(lab, engine_of, uses):
    prompts = lab.prompts_of(3, seed=11, low=45, high=60)
    alone = {
        f"r{i}": lab.run_engine(engine_of(*uses), [p], max_tokens=40).ids() for i, p in enumerate(prompts)
    }
    engine = engine_of(*uses, pages=19 if KIVI not in uses else 4, budget=8)
    preempted = 0
    for i, prompt in enumerate(prompts):
        engine.add(Request(f"r{i}", tuple(prompt), SamplingParams(max_tokens=40)))
    said: dict[str, list[int]] = {}
    while engine.has_work:
        step, events = engine.step()
        preempted += len(step.preempted)
        engine.kv.check()
        for e in events:
            said.setdefault(e.request_id, []).extend(t.id for t in e.tokens)
    assert said == alone and preempted > 0
    assert [pool.used for pool in engine.kv.each_pool] == [0]
    assert not engine.kv.stores[0].held.open.rows


def test_pages_cached_by_one_group_go_to_another(lab, engine_of):
    """Prefixes fill the pool; a long prompt takes their pages, whichever group they belonged to."""
    engine = engine_of("prefix_cache", pages=30)
    for seed in range(6):
        lab.run_engine(engine, lab.prompts_of(1, seed=seed, low=60, high=61), max_tokens=2)
    pool = engine.kv.pools[0]
    before = {p: pool.owners[p] for p in pool.cached_pages()}
    assert len(set(before.values())) == 6
    prompt = lab.prompts_of(1, seed=77, low=100, high=101)[0]
    first = lab.run_engine(engine, [prompt], max_tokens=4)
    assert any(pool.owners[p] != g for p, g in before.items())
    engine.kv.check()
    again = lab.run_engine(engine, [prompt], max_tokens=4)
    assert again.ids() == first.ids() and again.cached() > 0
    named = {(g, p) for e in engine.kv.index._by_page.values() for g, p in enumerate(e.pages) if p}
    assert all(pool.owners[p] == g for g, p in named)  # no entry names a page that became another group's


@pytest.mark.parametrize("uses", [(), ("kv_int8",), (KIVI,), ("draft_model",), ("quest",)])
def test_storages_are_counted_once_and_empty_layers_as_fragmentation(lab, engine_of, uses):
    engine = engine_of(*uses, family="uneven")
    engine.add(Request("a", tuple(lab.prompts_of(1, low=60, high=61)[0]), SamplingParams(max_tokens=4)))
    engine.step()
    shown = engine.memory()
    stores = engine.kv.stores
    assert len({store.held for store in stores}) == 1
    held, size = stores[0].held, engine.kv.page_size
    tensors = [*held.planes.values(), held.positions, *held.open.planes.values(), *(held.work or ())]
    tensors += [held.bounds.low, held.bounds.high] if held.bounds else []
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(shown[c] for c in (*KV, "workspace")) == sum(storages.values())
    if not uses:  # float32 rows of the layers there are
        config = engine.executor.decoder.config
        (seq,) = engine.sequences("a")
        behind = (seq.computed - WINDOW + 1) // size * size
        rows = 2 * 60 + 5 * (60 - behind)
        assert abs(shown["kv_payload"] - rows * 2 * config.kv_size * 4) <= len(stores)
        assert len(stores[2].planes["k"]) == 1 < len(held.planes["k"]) == 2


def test_pages_of_another_size_lie_in_another_pool(lab, engine_of):
    engine = engine_of("adacurdkv", family="uneven", pages=40)
    kv = engine.kv
    assert [kv.each_pool.index(pool) for pool in kv.pools] == [0, 1, 1, 1, 1]
    assert [pool.pages for pool in kv.each_pool] == [40, 160]
    assert kv.stores[1].planes["k"] is kv.stores[4].planes["k"]
    assert kv.stores[0].held is not kv.stores[1].held
    engine.add(Request("a", tuple(lab.prompts_of(1, low=60, high=61)[0]), SamplingParams(max_tokens=4)))
    engine.step()
    for g, pool in enumerate(kv.pools):
        for page in engine.sequences("a")[0].tables[g]:
            assert not page or pool.owners[page] == g
    kv.check()


def test_a_picture_of_the_pool_says_whose_pages_are_whose(lab, engine_of):
    engine = engine_of("prefix_cache")
    lab.run_engine(engine, lab.prompts_of(1, seed=2, low=60, high=61), max_tokens=2)
    engine.add(Request("a", tuple(lab.prompts_of(1, low=60, high=61)[0]), SamplingParams(max_tokens=4)))
    engine.step()
    groups = page_snapshot(engine).groups
    taken = [{*g.refs, *g.cached} for g in groups]
    for i, group in enumerate(groups):
        assert set(group.others) == set().union(*(t for j, t in enumerate(taken) if j != i))
        assert not taken[i] & set(group.others)
    pool = engine.kv.pools[0]
    assert sum(map(len, taken)) == pool.used + pool.cached
