"""Sliding-window groups give back what no token sees any more, and still share prefixes."""

from __future__ import annotations

from types import ModuleType

import pytest

from workbench.engine.pages import NULL_PAGE
from workbench.engine.params import SamplingParams
from workbench.engine.prefix import Match
from workbench.engine.sequence import Request
from workbench.engine.snapshot import page_snapshot
from workbench.engine.windows import Windows

pytestmark = pytest.mark.usefixtures("inference")

PAGE = 4
WINDOW = 24  # of the random Gemma; its second KV group


@pytest.fixture
def gemma(lab: ModuleType):
    def make(*uses: str, pages: int = 64, **kwargs):
        return lab.make_engine("paged", *uses, family="gemma3", page_size=PAGE, pool=pages * PAGE, **kwargs)

    return make


def groups(engine) -> tuple[int, int]:
    """Indices of the group with a window and of the one without."""
    windows = [g.window for g in engine.executor.decoder.config.kv_groups]
    assert sorted(windows, key=str) == [WINDOW, None]
    return windows.index(WINDOW), windows.index(None)


@pytest.mark.parametrize("uses", [(), ("chunked_prefill:budget=16",), ("ngram:k=4",), ("kv_int8",)], ids=str)
def test_pages_behind_the_window_are_held_no_longer(lab, gemma, uses):
    engine = gemma(*uses)
    sliding, full = groups(engine)
    prompt = lab.prompts_of(1, seed=4, low=60, high=61)[0]
    engine.add(Request("a", tuple(prompt), SamplingParams(max_tokens=30)))
    seq = engine.sequences("a")[0]
    while engine.has_work:
        engine.step()
        if not seq.tables or seq.computed < 60:
            continue
        behind = (seq.computed - WINDOW + 1) // PAGE
        assert seq.tables[sliding][:behind] == [NULL_PAGE] * behind
        assert NULL_PAGE not in seq.tables[sliding][behind:] and NULL_PAGE not in seq.tables[full]
        pool = engine.kv.pools[sliding]
        assert pool.used_by(sliding) == len(seq.tables[sliding]) - behind <= WINDOW // PAGE + 3
        assert pool.used_by(full) == len(seq.tables[full]) and pool is engine.kv.pools[full]
        (shown,) = page_snapshot(engine).groups[sliding].sequences
        assert shown.pages[0] == NULL_PAGE and NULL_PAGE not in page_snapshot(engine).groups[sliding].refs
        engine.kv.check()
    assert [pool.used for pool in engine.kv.pools] == [0, 0]


@pytest.mark.parametrize("index", ["prefix_cache", "radix_cache"])
def test_a_prefix_is_found_as_long_as_what_its_end_sees_is_there(lab, gemma, index):
    """Another prompt takes the window's oldest cached pages: the full prefix stays of use."""
    prompt = lab.prompts_of(1, seed=5, low=48, high=49)[0]
    engine = gemma(index)
    sliding, _ = groups(engine)
    first = lab.run_engine(engine, [prompt], max_tokens=4)
    pool = engine.kv.pools[sliding]
    oldest = pool.cached_pages()
    taken = pool.allocate(pool.free - len(oldest) + 3)  # three of the cached pages are evicted
    lost = [p for p in taken if p in oldest]
    assert len(lost) == 3
    again = lab.run_engine(engine, [prompt], max_tokens=4)
    assert again.ids() == first.ids()
    # Pages behind the window went first; the end of the prompt still sees all it needs.
    assert again.cached() == (44 if index == "prefix_cache" else 47)
    pool.release(taken)
    engine.kv.check()


@pytest.mark.parametrize("index", ["prefix_cache", "radix_cache"])
def test_a_lost_page_inside_the_window_shortens_the_match_until_it_is_computed_again(lab, gemma, index):
    prompt = lab.prompts_of(1, seed=6, low=48, high=49)[0]
    engine = gemma(index)
    sliding, _ = groups(engine)
    first = lab.run_engine(engine, [prompt], max_tokens=2)
    entries = engine.kv.index.match(prompt, engine.kv.namespace, 47).full
    lost = entries[9].pages[sliding]
    engine.kv.pools[sliding].unpublish(lost)
    engine.kv.index.lose_page(sliding, lost)
    assert engine.kv.windows.whole(engine.kv.index.match(prompt, engine.kv.namespace, 47)).full == entries[:9]
    second = lab.run_engine(engine, [prompt], max_tokens=2)
    assert second.ids() == first.ids() and second.cached() == 36
    third = lab.run_engine(engine, [prompt], max_tokens=2)  # the second run gave the entry its page back
    assert third.ids() == first.ids() and third.cached() >= 44
    engine.kv.check()


def test_a_page_of_the_full_group_takes_its_entry_with_it(lab, gemma):
    prompt = lab.prompts_of(1, seed=7, low=48, high=49)[0]
    engine = gemma("prefix_cache")
    _, full = groups(engine)
    lab.run_engine(engine, [prompt], max_tokens=2)
    pool = engine.kv.pools[full]
    taken = pool.allocate(pool.free)
    assert len(engine.kv.index) == 0 and all(p.cached == 0 for p in engine.kv.pools)
    pool.release(taken)
    engine.kv.check()


def test_samples_share_what_is_left_of_a_window(lab, gemma):
    prompt = lab.prompts_of(1, seed=8, low=60, high=61)[0]
    kw = {"n": 3, "temperature": 3.0, "seed": 1, "max_tokens": 6}
    paged, contiguous = gemma(), lab.make_engine(family="gemma3", pool=512, context=96)
    a, b = (lab.run_engine(e, [prompt], **kw) for e in (paged, contiguous))
    assert all(a.ids("r0", i) == b.ids("r0", i) for i in range(3))
    paged.kv.check()
    assert [pool.used for pool in paged.kv.pools] == [0, 0]


def test_what_a_window_hides_is_counted_in_whole_pages():
    windows = Windows([None, 8], 2, 4)
    # Token 8 sees keys 1 to 8: page 0 is needed; token 11 sees 4 to 11.
    assert [windows.behind(1, n) for n in (0, 7, 8, 10, 11, 14, 15)] == [0, 0, 0, 0, 1, 1, 2]
    assert windows.behind(0, 10**6) == 0
    assert windows.may_lose(1) and not windows.may_lose(0)
    assert not Windows([8, 16], 2, 4).may_lose(0)
    assert Windows([], 2, 4).whole(Match([])) == Match([])
