"""Paged KV, prefix cache, copy-on-write and preemption: failures other projects had, as tests."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from workbench.engine.params import SamplingParams
from workbench.engine.prefix import PrefixIndex
from workbench.engine.sequence import Request

pytestmark = pytest.mark.usefixtures("inference")


@pytest.fixture
def engine4(lab: ModuleType):
    """Engines with pages of 4 slots: smaller than a user may choose, as the rows ask."""

    def make(*uses: str, pages: int = 64, **kwargs):
        return lab.make_engine("paged", *uses, page_size=4, pool=pages * 4, **kwargs)

    return make


def run(lab, engine, prompts, **kw):
    kw.setdefault("max_tokens", 4)
    return lab.run_engine(engine, prompts, **kw)


@pytest.mark.parametrize(("length", "cached"), [(8, 4), (4, 0), (9, 8)])
def test_pkv_01_a_fully_cached_prompt_still_computes_a_token(lab, engine4, length, cached):
    prompt = list(range(1, length + 1))
    engine = engine4("prefix_cache")
    first = run(lab, engine, [prompt])
    again = run(lab, engine, [prompt])
    assert again.ids() == first.ids()
    assert again.cached() == cached
    assert sum(s.prefill + s.decode for s in again.steps) >= 1 + 3  # at least one prompt token, three decodes


@pytest.mark.parametrize("digest", [None, lambda parent, tokens: b"\0"])
def test_pkv_02_another_ancestry_never_hits_even_when_the_hash_collides(lab, engine4, digest):
    p1, p2 = [1, 2, 3, 4, 9, 9, 9, 9, 5], [6, 7, 8, 9, 9, 9, 9, 9, 5]
    engine = engine4("prefix_cache")
    if digest is not None:
        engine.kv.index = PrefixIndex(4, digest)
    run(lab, engine, [p1])
    second = run(lab, engine, [p2])
    cold = run(lab, engine4("prefix_cache"), [p2])
    assert second.cached() == 0
    assert second.ids() == cold.ids()
    third = run(lab, engine, [p1])
    assert third.cached() == 8


@pytest.mark.parametrize("plain_first", [True, False])
def test_pkv_03_prompt_logprobs_are_complete_whatever_is_cached(lab, engine4, plain_first):
    prompt = [5, 9, 2, 7, 1, 1, 4, 8, 3, 6]
    engine = engine4("prefix_cache")
    if plain_first:
        run(lab, engine, [prompt])
    engine.add(Request("s", tuple(prompt), SamplingParams(max_tokens=0, prompt_logprobs=0)))
    seq = engine.sequences("s")[0]
    while engine.has_work:
        engine.step()
    sink: list = []
    cold = engine4()
    lab.record_logits(cold, sink)
    lab.run_engine(cold, [prompt], max_tokens=0, prompt_logprobs=0)
    rows = {p: row.log_softmax(-1) for _, p, row in sink}
    assert sorted(seq.prompt_logprobs) == list(range(1, 10))
    for p, (value, _) in seq.prompt_logprobs.items():
        assert abs(value - rows[p - 1][prompt[p]].item()) < 1e-5


@pytest.mark.parametrize(
    ("length", "pages", "in_last"), [(1, 1, 1), (3, 1, 3), (4, 1, 4), (5, 2, 1), (8, 2, 4)]
)
def test_pkv_04_counts_at_exact_page_multiples(lab, engine4, length, pages, in_last):
    engine = engine4()
    engine.add(Request("a", tuple(range(length)), SamplingParams(max_tokens=1)))
    seq = engine.sequences("a")[0]
    assert engine.kv.admit(seq, length)
    assert len(seq.tables[0]) == pages
    assert all(engine.kv.pools[0].refs[p] == 1 for p in seq.tables[0])
    assert (length - 1) % 4 + 1 == in_last
    engine.kv.release(seq)
    assert engine.kv.pools[0].used == 0
    assert engine.kv.pools[0].free == engine.kv.pages
    engine.kv.check()


def test_pkv_06_eviction_never_takes_a_page_in_use(lab, engine4):
    x = [3, 1, 4, 1, 5, 9, 2, 6]
    alone = run(lab, engine4(), [x], max_tokens=6)
    engine = engine4("prefix_cache", pages=6)
    engine.add(Request("x", tuple(x), SamplingParams(max_tokens=6)))
    with torch.inference_mode():
        engine.step()
        got: list[int] = []
        for i in range(5):
            engine.add(Request(f"u{i}", tuple(20 + i + j for j in range(7)), SamplingParams(max_tokens=1)))
        for _ in range(200):
            if not engine.has_work:
                break
            _, events = engine.step()
            got += [t.id for e in events if e.request_id == "x" for t in e.tokens]
            engine.kv.check()
            tables = [s.tables[0] for s in engine.scheduler.running]
            for page in {p for t in tables for p in t}:
                assert engine.kv.pools[0].refs[page] >= sum(page in t for t in tables)
    assert got == alone.ids()[1:]


@pytest.mark.parametrize(("length", "copies"), [(6, 1), (8, 0)])
def test_pkv_08_fork_copies_only_the_half_filled_page(lab, engine4, length, copies):
    prompt = [7, 3, 9, 1, 4, 8, 2, 6][:length]
    engine = engine4()
    ran = run(lab, engine, [prompt], n=2, temperature=1.0, seed=3, max_tokens=3, logprobs=0)
    assert engine.kv.copies == copies
    first = [ran.ids("r0", s)[0] for s in (0, 1)]
    for sample in (0, 1):
        forced = engine4()
        sink: list = []
        lab.record_logits(forced, sink)
        ids = [*prompt, *ran.ids("r0", sample)[:2]]
        lab.run_engine(forced, [ids], max_tokens=1)
        alone = sink[-1][2].log_softmax(-1)[ran.ids("r0", sample)[2]].item()
        assert abs(alone - ran.logprobs("r0", sample)[2]) < 1e-5
    assert len(first) == 2
    assert engine.kv.pools[0].used == 0


def test_pkv_08_the_shared_full_page_has_two_owners(lab, engine4):
    engine = engine4()
    engine.add(Request("a", (7, 3, 9, 1, 4, 8), SamplingParams(n=2, temperature=1.0, max_tokens=4)))
    with torch.inference_mode():
        engine.step()
        engine.step()
    a, b = engine.sequences("a")
    assert a.tables[0][0] == b.tables[0][0]
    assert engine.kv.pools[0].refs[a.tables[0][0]] == 2
    assert a.tables[0][1] != b.tables[0][1]


def test_pkv_09_preemption_neither_loses_nor_repeats_tokens(lab, engine4):
    prompts = [[1, 2, 3, 4, 5, 6], [9, 8, 7, 6, 5, 4], [11, 3, 11, 3, 11, 3]]
    wide = [run(lab, engine4(), [p], max_tokens=16).ids() for p in prompts]
    engine = engine4(pages=8)
    ran = run(lab, engine, prompts, max_tokens=16)
    assert sum(len(s.preempted) for s in ran.steps) >= 1
    assert [ran.ids(f"r{i}") for i in range(3)] == wide
    assert sum(len(ran.ids(f"r{i}")) for i in range(3)) == 48
    assert engine.kv.pools[0].free == engine.kv.pages
    engine.kv.check()


@pytest.mark.parametrize(("removed", "hit"), [(0, 0), (1, 4)])
def test_pkv_11_the_first_gap_ends_a_hit(lab, engine4, removed, hit):
    prompt = [5, 4, 3, 2, 1, 9, 8, 7, 6, 2, 4, 6, 8]
    engine = engine4("prefix_cache")
    run(lab, engine, [prompt], max_tokens=1)
    entries = engine.kv.index.lookup(prompt, engine.kv.namespace, 12)
    assert len(entries) == 3
    page = entries[removed].pages[0]
    engine.kv.index.drop_page(0, page)
    engine.kv.pools[0].unpublish(page)
    again = run(lab, engine, [prompt], max_tokens=5)
    assert again.cached() == hit
    assert again.ids() == run(lab, engine4(), [prompt], max_tokens=5).ids()
    engine.kv.check()


def test_pkv_14_a_reused_table_never_reaches_another_owners_pages(lab, engine4):
    engine = engine4(pages=16)
    live = Request("live", (1, 2, 3, 4, 5), SamplingParams(max_tokens=30))
    engine.add(Request("old", tuple(range(20)), SamplingParams(max_tokens=1)))
    engine.add(live)
    with torch.inference_mode():
        engine.step()  # "old" held 5 pages and is gone
        pages = list(engine.sequences("live")[0].tables[0])
        before = engine.kv.stores[0].planes["k"][:, pages].clone()
        filled = engine.sequences("live")[0].computed
        engine.add(Request("new", tuple(range(7, 19)), SamplingParams(max_tokens=2)))
        engine.step()
        engine.step()
    after = engine.kv.stores[0].planes["k"][:, pages]
    assert torch.equal(before[:, 0], after[:, 0])
    assert filled == 5
    tables = [p for s in engine.scheduler.running for p in s.tables[0]]
    assert len(tables) == len(set(tables))
    assert 0 not in tables


def test_salt_separates_callers(lab, engine4):
    prompt = list(range(1, 14))
    engine = engine4("prefix_cache")
    run(lab, engine, [prompt], salt="a")
    assert run(lab, engine, [prompt], salt="b").cached() == 0
    assert run(lab, engine, [prompt], salt="a").cached() == 12


def test_freed_and_idle_pages_full_of_nan_change_nothing(lab, engine4):
    prompt = [4, 9, 4, 9, 1, 2, 3]
    clean = run(lab, engine4(), [prompt], max_tokens=8, logprobs=0)
    engine = engine4()
    run(lab, engine, [prompt], max_tokens=2)
    for plane in engine.kv.stores[0].planes.values():
        plane.fill_(float("nan"))
    again = run(lab, engine, [prompt], max_tokens=8, logprobs=0)
    assert again.ids() == clean.ids()
    assert again.logprobs() == clean.logprobs()


@pytest.mark.parametrize("max_tokens", [0, 6])
def test_every_sample_carries_the_scores_of_the_prompt_it_shares(lab, engine4, max_tokens):
    """Before, a sample had them only when it happened to be preempted and computed the prompt again."""
    engine = engine4()
    engine.add(Request("r", (5, 6, 7, 8, 9), SamplingParams(n=3, max_tokens=max_tokens, prompt_logprobs=1)))
    samples = engine.sequences("r")
    while engine.has_work:
        engine.step()
    assert all(sorted(s.prompt_logprobs) == [1, 2, 3, 4] for s in samples)
    assert samples[0].prompt_logprobs == samples[1].prompt_logprobs == samples[2].prompt_logprobs


def test_forgotten_prefixes_are_found_no_more_and_their_pages_are_clean(lab, engine4):
    prompt = list(range(1, 18))
    engine = engine4("prefix_cache")
    first = run(lab, engine, [prompt])
    pool = engine.kv.pools[0]
    assert pool.cached >= 4
    engine.kv.forget_prefixes()
    engine.kv.check()
    assert (pool.cached, len(engine.kv.index), pool.free) == (0, 0, pool.pages)
    again = run(lab, engine, [prompt])
    assert (again.cached(), again.ids()) == (0, first.ids())
    assert run(lab, engine, [prompt]).cached() == 16
