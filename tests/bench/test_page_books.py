"""Page bookkeeping in pure Python: operations per second, printed, never asserted. ``pytest -m bench -s``."""

from __future__ import annotations

import random
from time import perf_counter

import pytest

from workbench.engine.pages import PagePool
from workbench.engine.prefix import Entry, PrefixIndex

PAGES, PAGE = 4096, 16


@pytest.mark.bench
def test_pages_allocated_published_and_freed() -> None:
    pool, rng, held, done = PagePool(PAGES, PAGE), random.Random(0), list[list[int]](), 0
    begin = perf_counter()
    while done < 400_000:
        pages = pool.allocate(rng.randrange(1, 33)) if rng.random() < 0.5 or not held else None
        if pages is None and held:
            pool.release(pages := held.pop(rng.randrange(len(held))))
        elif pages:
            held.append(pages)
            for page in pages[::2]:
                pool.publish(page)
        done += len(pages or ())
    seconds = perf_counter() - begin
    pool.check()
    print(f"allocate, publish, free, evict: {done / seconds:,.0f} page operations/s")


@pytest.mark.bench
def test_prefix_lookup() -> None:
    rng = random.Random(0)
    index, tokens = PrefixIndex(PAGE), [rng.randrange(49152) for _ in range(512 * PAGE)]
    parent: Entry | None = None
    for i in range(512):
        parent, _ = index.publish(parent, tuple(tokens[i * PAGE : (i + 1) * PAGE]), b"", (i + 1,))
    begin = perf_counter()
    for _ in range(20):
        found = index.match(tokens, b"", len(tokens))
    seconds = perf_counter() - begin
    assert len(found.full) == 512
    print(f"prefix lookup: {seconds / 20 / 512 * 1e6:.2f} µs per page")
