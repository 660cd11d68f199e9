"""What happened to pages between two pictures of them: taken, shared, copied on write, given back, evicted.

Read off the tables alone, so it holds for pictures several steps apart: a table only grows at its end, except
where a shared page was copied before somebody wrote to it, and where a page fell behind a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from workbench.engine.snapshot import GroupPages, PageSnapshot, SequencePages

What = Literal["hit", "taken", "shared", "copied", "behind", "ended", "cached", "evicted"]
Names = Mapping[tuple[str, int], int]


@dataclass(frozen=True)
class Change:
    """One thing that happened after ``step``: to ``pages`` of KV group ``group``; ``sequence`` 0: nobody's.

    ``words`` say it with the step left out.
    """

    step: int
    group: int
    what: What
    sequence: int
    pages: tuple[int, ...]
    words: str


def number(snapshot: PageSnapshot, names: dict[tuple[str, int], int]) -> Names:
    """Number sequences from 1 in the order in which they are first seen; ``names`` is kept by the caller."""
    for group in snapshot.groups[:1]:
        for seq in group.sequences:
            names.setdefault((seq.request_id, seq.sample), len(names) + 1)
    return names


def changes(before: PageSnapshot | None, after: PageSnapshot, names: Names) -> list[Change]:
    """Everything that differs, group by group, in the order sequences were first seen."""
    found: list[Change] = []
    for g, group in enumerate(after.groups):
        old = before.groups[g] if before is not None else None
        found += (
            Change(after.step, g, what, seq, pages, words)
            for what, seq, pages, words in _of_group(old, group, names)
        )
    return found


Told = tuple[What, int, tuple[int, ...], str]


def _of_group(old: GroupPages | None, new: GroupPages, names: Names) -> Iterator[Told]:
    earlier = {(s.request_id, s.sample): s for s in (old.sequences if old is not None else ())}
    was_cached = set(old.cached) if old is not None else set()
    was_held = set(old.refs) if old is not None else set()
    for seq in new.sequences:
        key = seq.request_id, seq.sample
        yield from _of_sequence(earlier.pop(key, None), seq, was_cached, was_held, names[key])
        was_held |= set(seq.pages)  # who comes later shares them
    for key in earlier:
        yield (
            "ended",
            names[key],
            (),
            f"sequence {names[key]} ended or was put back: it holds no page any more",
        )
    kept = tuple(p for p in new.cached if p in was_held)
    if kept:
        yield "cached", 0, kept, f"{_pages(kept)} stay findable though nobody holds them"
    gone = tuple(p for p in was_cached if p not in new.cached and p not in new.refs)
    if gone:
        yield "evicted", 0, gone, f"{_pages(gone)} dropped from the prefix cache"


def _of_sequence(
    old: SequencePages | None, new: SequencePages, cached: set[int], held: set[int], who: int
) -> Iterator[Told]:
    if old is None or new.filled < old.filled:
        shared = tuple(p for p in new.pages if p and p in held)
        hit = tuple(p for p in new.pages if p in cached and p not in held)
        taken = tuple(p for p in new.pages if p and p not in cached and p not in held)
        if hit:
            yield "hit", who, hit, f"sequence {who} finds {_pages(hit)} in the prefix cache"
        if shared:
            yield "shared", who, shared, f"sequence {who} shares {_pages(shared)}"
        if taken:
            yield "taken", who, taken, f"sequence {who} takes {_pages(taken)}"
        return
    for i, (a, b) in enumerate(zip(old.pages, new.pages, strict=False)):
        if a and b and a != b:
            where = f"entry {i + 1} of its table"
            yield "copied", who, (a, b), f"sequence {who} copies page {a} to {b} before it writes ({where})"
    behind = tuple(a for a, b in zip(old.pages, new.pages, strict=False) if a and not b)
    if behind:
        yield "behind", who, behind, f"sequence {who} gives back {_pages(behind)} behind its window"
    taken = tuple(p for p in new.pages[len(old.pages) :] if p)
    if taken:
        yield "taken", who, taken, f"sequence {who} takes {_pages(taken)}"


def _pages(pages: tuple[int, ...]) -> str:
    """``page 3``, ``pages 3–5``, ``pages 3, 4, 9``, ``12 pages (3–14)``."""
    if len(pages) == 1:
        return f"page {pages[0]}"
    ordered = sorted(pages)
    if ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"pages {ordered[0]}–{ordered[-1]}"
    return f"pages {', '.join(map(str, ordered))}" if len(ordered) <= 6 else f"{len(ordered)} pages"
