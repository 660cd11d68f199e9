"""Bytes of a KV cache by category: what live tokens fill, what is left empty, cached or free.

The categories add up to the storages held.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workbench.engine.pages import NULL_PAGE, PagePool
from workbench.engine.sequence import Sequence
from workbench.engine.store import PageStore


def kv_bytes(pools: Seq[PagePool], stores: Seq[PageStore], running: Seq[Sequence]) -> dict[str, int]:
    """Bytes by category; what live tokens fill, what allocated slots leave empty, what is cached or free.

    The categories add up to the storages held. The coded bytes of a page that is still open hold nothing
    yet: they count as fragmentation, its open row as payload as far as it is filled.
    """
    out = dict.fromkeys(("kv_payload", "kv_meta", "fragmentation", "kv_cached", "kv_free", "workspace"), 0)
    size = pools[0].page_size
    for g, (pool, store) in enumerate(zip(pools, stores, strict=True)):
        held = store.nbytes()
        live = {True: 0, False: 0}  # filled slots of open and of coded pages
        pages = {True: 0, False: 0}
        for page, n in _filled(running, g, size).items():
            is_open = store.is_open(page)
            live[is_open] += n
            pages[is_open] += 1
        slots = (pool.pages + 1) * size
        coded = held["kv_payload"] + held["kv_meta"]
        opened = store.open_page_nbytes
        payload = held["kv_payload"] * live[False] // slots + opened * live[True] // size
        meta = held["kv_meta"] * live[False] // slots
        in_tables = coded * (pages[True] + pages[False]) * size // slots + opened * pages[True]
        cached = coded * pool.cached * size // slots
        out["kv_payload"] += payload
        out["kv_meta"] += meta
        out["fragmentation"] += in_tables - payload - meta
        out["kv_cached"] += cached
        out["kv_free"] += coded + held["kv_open"] - in_tables - cached
        out["workspace"] += held["workspace"]
    return out


def _filled(running: Seq[Sequence], group: int, size: int) -> dict[int, int]:
    """Slots that hold a token, per page of the tables of ``running``; a shared page counts once."""
    filled: dict[int, int] = {}
    for seq in running:
        if not seq.tables:
            continue
        table = seq.tables[group]
        full, rest = divmod(seq.used(group), size)
        for i, page in enumerate(table):
            if page == NULL_PAGE:
                continue
            n = size if i < full else rest if i == full else 0
            if n >= filled.get(page, 0):
                filled[page] = n
    return filled
