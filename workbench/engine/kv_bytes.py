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

    ``pools`` and ``stores`` are those of each KV group; groups may share a pool, whose bytes count once. The
    categories add up to the storages held. The coded bytes of a page that is still open hold nothing
    yet: they count as fragmentation, its open row as payload as far as it is filled. So do the layers that
    a page of the pool has and its group has not.
    """
    out = dict.fromkeys(("kv_payload", "kv_meta", "fragmentation", "kv_cached", "kv_free", "workspace"), 0)
    for pool in dict.fromkeys(pools):
        groups = [g for g, own in enumerate(pools) if own is pool]
        held = stores[groups[0]].nbytes()
        slots = (pool.pages + 1) * pool.page_size
        coded = held["kv_payload"] + held["kv_meta"]
        free = coded + held["kv_open"]
        for g in groups:
            used = _used(stores[g], held, slots, _filled(running, g, pool.page_size))
            for category, nbytes in used.items():
                out[category] += nbytes
            free -= sum(used.values())
        cached = coded * pool.cached * pool.page_size // slots
        out["kv_cached"] += cached
        out["kv_free"] += free - cached
        out["workspace"] += held["workspace"]
    return out


def _used(store: PageStore, held: dict[str, int], slots: int, filled: dict[int, int]) -> dict[str, int]:
    """Bytes of one group's pages in tables, of a pool of ``slots`` slots that holds ``held``."""
    size = store.geometry.page_size
    live = {True: 0, False: 0}  # filled slots of open and of coded pages
    pages = {True: 0, False: 0}
    for page, n in filled.items():
        is_open = store.is_open(page)
        live[is_open] += n
        pages[is_open] += 1
    own, layers = store.geometry.layers, store.held.geometry.layers
    opened = store.open_page_nbytes
    payload = held["kv_payload"] * live[False] * own // (slots * layers)
    payload += opened * live[True] * own // (size * layers)
    meta = held["kv_meta"] * live[False] * own // (slots * layers)
    coded = held["kv_payload"] + held["kv_meta"]
    in_tables = coded * (pages[True] + pages[False]) * size // slots + opened * pages[True]
    return {"kv_payload": payload, "kv_meta": meta, "fragmentation": in_tables - payload - meta}


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
