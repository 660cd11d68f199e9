"""Counts and bytes of the KV cache, as shown to people."""

from __future__ import annotations

import pytest

from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request

pytestmark = pytest.mark.usefixtures("inference")

CODECS = ["", "kv_fp8", "kv_int8", "kivi:residual=32,group=32"]


def held(engine) -> int:
    """Bytes of every storage of the KV cache, found without asking it."""
    seen: dict[int, int] = {}
    for store in engine.kv.stores:
        opened, work = store.held.open.planes, store.held.work
        tensors = [*store.planes.values(), *opened.values(), *(work or ()), store.positions]
        for t in tensors:
            seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(seen.values())


@pytest.mark.parametrize("uses", [("paged",), ("paged", "prefix_cache", "ngram"), ()], ids=str)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_kvc_15_lengths_and_bytes_are_what_is_held(lab, codec, uses, family):
    engine = lab.make_engine(*uses, *([codec] if codec else []), family=family, pool=512, context=128)
    prompt = lab.prompts_of(1, seed=9, low=100, high=101)[0]
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=12)))
    engine.add(Request("b", tuple(prompt[:50]), SamplingParams(max_tokens=3)))
    seq = engine.sequences("a")[0]
    categories = ("kv_payload", "kv_meta", "fragmentation", "kv_cached", "kv_free", "workspace")
    static = sum(engine.static_bytes.values())
    while seq.n_generated < 10:
        step, _ = engine.step()
        memory = engine.memory()
        assert step.bytes == memory
        assert min(memory.values()) >= 0
        assert sum(memory[c] for c in categories) == held(engine)
        assert sum(memory.values()) == static + held(engine) + memory["draft"]
    assert len(seq.tokens) == 100 + seq.n_generated  # logical
    assert seq.computed == len(seq.tokens) - 1  # stored: the newest token is not in the cache yet
    groups = engine.executor.decoder.config.kv_groups
    for store, table, group in zip(engine.kv.stores, seq.tables, groups, strict=True):
        size = engine.kv.page_size
        slots = [table[i // size] * size + i % size for i in range(seq.computed)]
        behind = 0  # tokens in pages that were given back
        if group.window is not None and uses:
            behind = (seq.computed - group.window + 1) // size * size
            assert behind > 0 or "kivi" in codec
        assert store.positions[slots].tolist() == [-1] * behind + list(range(behind, seq.computed))
    while engine.has_work:
        engine.step()
    memory = engine.memory()
    assert (memory["fragmentation"], memory["draft"]) == (0, 0)
    assert sum(memory[c] for c in categories) == held(engine)


def test_kvc_15_live_bytes_follow_the_tokens(lab):
    """Payload is exactly live slots times bytes per slot; the rest of their pages is fragmentation."""
    engine = lab.make_engine("paged", dtype="float32", page_size=16, pool=256)
    engine.add(Request("a", tuple(range(20)), SamplingParams(max_tokens=8)))
    config = engine.executor.decoder.config
    slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    for n in (20, 21, 22):
        engine.step()
        assert engine.memory()["kv_payload"] == n * slot
        assert engine.memory()["fragmentation"] == (32 - n) * (slot + 4)  # 4: the slot's position


def test_kvc_15_shared_pages_count_once(lab):
    engine = lab.make_engine("paged", dtype="float32", page_size=4, pool=256)
    engine.add(Request("a", tuple(range(8)), SamplingParams(max_tokens=4, n=3, temperature=1.0)))
    config = engine.executor.decoder.config
    slot = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    engine.step()
    assert engine.memory()["kv_payload"] == 8 * slot
    engine.step()
    assert engine.memory()["kv_payload"] == (8 + 3) * slot


@pytest.mark.parametrize("prompt_length", [40, 64])
@pytest.mark.parametrize("codec", CODECS)
def test_forked_contiguous_caches_equal_paged_ones(lab, codec, prompt_length):
    """Without paging a fork copies its parent's caches, coded pages included."""
    prompt = lab.prompts_of(1, seed=2, low=prompt_length, high=prompt_length + 1)[0]
    kw = {"n": 3, "temperature": 3.0, "seed": 3, "max_tokens": 6, "logprobs": 0}
    runs = []
    for uses in ((), ("paged:page_size=32" if not codec.startswith("kivi") else "paged",)):
        engine = lab.make_engine(*uses, *([codec] if codec else []), pool=512, context=96)
        runs.append(lab.run_engine(engine, [prompt], **kw))
        assert engine.kv.pools[0].used == 0
    for sample in range(3):
        assert runs[0].ids("r0", sample) == runs[1].ids("r0", sample)
        assert runs[0].logprobs("r0", sample) == runs[1].logprobs("r0", sample)


def test_cached_tokens_are_those_of_the_prompt_found_at_its_start(lab):
    """A preempted sequence finds its own pages again: that is no saving and is not shown as one."""
    engine = lab.make_engine("paged", "prefix_cache", page_size=4, pool=9 * 4, dtype="float32")
    prompts = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], [11, 3, 11, 3, 11, 3]]
    ran = lab.run_engine(engine, prompts, max_tokens=16)
    assert sum(len(s.preempted) for s in ran.steps) >= 1
    for i in range(3):
        shown = [e.cached_tokens for e in ran._of(f"r{i}", 0) if e.cached_tokens is not None]
        assert shown == [0, 0]


def test_a_long_prompt_never_holds_more_than_its_newest_page_uncoded(lab):
    """A page is opened by its first write: otherwise a prompt's peak would be that of the plain cache."""
    prompt = lab.prompts_of(1, seed=9, low=200, high=201)[0]
    sizes = {}
    for codec in ("", "kivi:residual=32,group=32"):
        engine = lab.make_engine("paged:page_size=32", *([codec] if codec else []), pool=256, context=256)
        engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=30)))
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, len(engine.kv.stores[0].held.open.rows))
        sizes[codec] = held(engine)
        assert most == (1 if codec else 0)
        assert not engine.kv.stores[0].held.open.rows
    assert sizes["kivi:residual=32,group=32"] < sizes[""]
