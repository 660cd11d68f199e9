"""Who holds which page right now, as plain data for a picture: read-only, cheap, taken between two steps.

Call it on the thread that steps the engine. Slot numbers are logical (the n-th token of a sequence); page ids
are those of the group's pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.engine.engine import Engine


@dataclass(frozen=True)
class SequencePages:
    """One running sequence in one KV group: its pages in order, and how many of their slots held a token.

    A page behind the group's window was given back; 0 stands in its place.
    """

    request_id: str
    sample: int
    filled: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class GroupPages:
    """One KV group. ``pages`` are those of its pool, which groups with pages of one size share.

    ``refs``: references per page that has any; ``cached``: pages without one whose content a prefix index
    still finds; ``open``: pages kept in full precision until they are full and coded; ``others``: pages of
    the pool that other groups hold, or have cached.
    """

    page_size: int
    pages: int
    sequences: tuple[SequencePages, ...]
    refs: dict[int, int]
    cached: tuple[int, ...]
    open: tuple[int, ...]
    others: tuple[int, ...] = ()


@dataclass(frozen=True)
class PageSnapshot:
    """Every KV group after engine step ``step``."""

    step: int
    groups: tuple[GroupPages, ...]


def page_snapshot(engine: Engine) -> PageSnapshot:
    """The page tables as they are."""
    kv, running = engine.kv, engine.scheduler.running
    groups = []
    for g, (pool, store) in enumerate(zip(kv.pools, kv.stores, strict=True)):
        sequences = tuple(
            SequencePages(s.request.id, s.sample, s.used(g), tuple(s.tables[g])) for s in running if s.tables
        )
        held = sorted({p for s in sequences for p in s.pages if p})
        cached = pool.cached_pages(g)
        others = {p for p in pool.taken() if pool.owners[p] != g}
        groups.append(
            GroupPages(
                page_size=kv.page_size,
                pages=pool.pages,
                sequences=sequences,
                refs={p: pool.refs[p] for p in held},
                cached=tuple(cached),
                open=tuple(p for p in held if store.is_open(p)),
                others=tuple(sorted(others)),
            )
        )
    return PageSnapshot(engine.steps, tuple(groups))


@dataclass(frozen=True)
class SequenceKept:
    """What a KV selector left of one running sequence: token numbers by layer and KV head, ascending.

    Every head sees these, and all tokens from ``since`` on. ``computed`` tokens went through the model.
    """

    request_id: str
    sample: int
    computed: int
    since: int
    layers: dict[int, tuple[tuple[int, ...], ...]]


def kept_snapshot(engine: Engine) -> tuple[SequenceKept, ...]:
    """The kept tokens of every running sequence that has been thinned out."""
    out = []
    for seq in engine.scheduler.running:
        layers = {layer: tuple(tuple(t.tolist()) for t in heads) for layer, heads in seq.kept.items()}
        if layers:
            out.append(SequenceKept(seq.request.id, seq.sample, seq.computed, seq.selected, layers))
    return tuple(out)
