"""Which pages are multiplied together: contiguous runs of the pool, or a gathered copy of strays.

A *run* is one batched matrix product. A run over contiguous pages is a view of the pool, so K and V
are not copied; every page in it carries the same number of query rows (its *height*), shorter stacks
are padded. Costs are counted in bytes of K and V moved, the unit that decides on a CPU: a call costs
``CALL_BYTES``, a query row adds a sixteenth of its page (2·2·P·D flop against 4·P·D bytes at about 16 flop
per byte), copying a page costs two more passes over it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

CALL_BYTES = 1 << 18
"""K and V bytes that could be read in the time two more kernel launches take (about 10 µs at 25 GB/s)."""

IDLE_SHARE = 0.1
"""Upper bound of idle pages computed along, as a share of the referenced ones (one is always allowed)."""


@dataclass(frozen=True)
class Run:
    """One batched product over ``pages``; ``view`` when they are ``pages[0], pages[0] + 1, …`` in the pool.

    ``height`` is the number of query rows per page and KV head, ``row`` the run's first row among all runs.
    """

    pages: tuple[int, ...]
    height: int
    view: bool
    row: int


def _cost(pages: int, height: int, page_bytes: int) -> float:
    return pages * page_bytes * (1 + height / 16)


def _segments(heights: Mapping[int, int], skip: Collection[int]) -> list[list[int]]:
    """``[first, end, height, referenced]`` of maximal contiguous stretches of equal height."""
    out: list[list[int]] = []
    for page in sorted(heights):
        if page in skip:
            continue
        if out and out[-1][1] == page and out[-1][2] == heights[page]:
            out[-1][1] += 1
            out[-1][3] += 1
        else:
            out.append([page, page + 1, heights[page], 1])
    return out


def _merge(segments: list[list[int]], page_bytes: int) -> list[list[int]]:
    """Join neighbours where padding and idle pages cost less than a call, within the idle budget."""
    idle = max(1, int(IDLE_SHARE * sum(s[3] for s in segments)))
    out: list[list[int]] = []
    for first, end, height, used in segments:
        if out:
            a, b, h, u = out[-1]
            gap, tall = first - b, max(h, height)
            apart = _cost(b - a, h, page_bytes) + _cost(end - first, height, page_bytes) + CALL_BYTES
            if gap <= idle and _cost(end - a, tall, page_bytes) <= apart:
                out[-1] = [a, end, tall, u + used]
                idle -= gap
                continue
        out.append([first, end, height, used])
    return out


def plan_runs(
    heights: Mapping[int, int], kv_heads: int, page_bytes: int, copied: Collection[int] = ()
) -> tuple[list[Run], int]:
    """Cover the pages of ``heights`` (page id to query rows per KV head) with runs.

    Pages in ``copied`` are always gathered. A view run becomes part of a gathered run when copying its
    pages (two extra passes) costs less than a call of its own. Gathered pages of similar height (within a
    factor of four) share a run and come after the views. Returns the runs and their number of rows.
    """
    views = _merge(_segments(heights, copied), page_bytes)
    strays = [s for s in views if 2 * s[3] * page_bytes < CALL_BYTES]
    if len(strays) < 2 and not copied:
        strays = []
    apart = {s[0] for s in strays}
    runs: list[Run] = []
    row = 0
    for first, end, height, _ in views:
        if first not in apart:
            runs.append(Run(tuple(range(first, end)), height, True, row))
            row += (end - first) * kv_heads * height
    loose = [p for s in strays for p in range(s[0], s[1]) if p in heights and p not in copied]
    loose += sorted(copied)
    classes: dict[int, list[int]] = {}
    for page in loose:
        classes.setdefault((heights[page] - 1).bit_length() // 2, []).append(page)
    for pages in classes.values():
        height = max(heights[p] for p in pages)
        runs.append(Run(tuple(pages), height, False, row))
        row += len(pages) * kv_heads * height
    return runs, row
