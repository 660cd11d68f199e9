"""Slots that hold nothing, or nothing any row may see: zeroed before they meet a weight of zero.

0 · NaN is NaN, so a mask alone does not keep an unused slot out of the sum over V. Slots after a
sequence's end hold nothing: they are zeroed in the pool, once per table. Slots behind every window are
somebody's data: they are zeroed in a copy of their page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from workbench.attention.edges import Member
from workbench.attention.spans import first_visible
from workbench.engine.seams import AttentionShape, AttentionSpan


def zero_slots(pool: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Zero ``pool[pages[i], :, slots[i]]`` in place, whatever the strides of ``pool`` [N, Hkv, P, D]."""
    pool.permute(0, 2, 1, 3)[pages, slots] = 0.0


def dead_tails(
    spans: Sequence[AttentionSpan], members: Sequence[Member], page_size: int, known: Mapping[int, int]
) -> tuple[dict[int, int], tuple[Tensor, Tensor] | None]:
    """The first unused slot of each last page, and the (page, slot) pairs that ``known`` has not zeroed yet.

    A page that several spans own is used as far as its longest owner uses it.
    """
    tails: dict[int, int] = {}
    for span, m in zip(spans, members, strict=True):
        used = (span.start + span.n_new - 1) % page_size + 1
        tails[m.pages[-1]] = max(used, tails.get(m.pages[-1], 0))
    if len(members) > 1:
        for m in members:
            for page in m.pages[:-1]:
                tails.pop(page, None)
    pages: list[int] = []
    slots: list[int] = []
    for page, used in tails.items():
        end = known.get(page, page_size)
        if used < end:
            pages += [page] * (end - used)
            slots += range(used, end)
    return tails, (torch.tensor(pages), torch.tensor(slots)) if pages else None


def grow_tails(
    tails: dict[int, int], spans: Sequence[AttentionSpan], members: Sequence[Member], page_size: int
) -> None:
    """Slots that a step writes are no longer zero, whether or not they are kept (rejected drafts)."""
    for span, m in zip(spans, members, strict=True):
        page = m.pages[-1]
        if page in tails:
            tails[page] = max(tails[page], (span.start + span.n_new - 1) % page_size + 1)


def hidden_heads(
    spans: Sequence[AttentionSpan], members: Sequence[Member], shape: AttentionShape
) -> dict[int, int]:
    """For each page that begins with slots behind every window of every owner: how many they are."""
    if shape.window is None:
        return {}
    out: dict[int, int] = {}
    for span, m in zip(spans, members, strict=True):
        behind = first_visible(span, shape.window) - m.first * shape.page_size
        out[m.pages[0]] = min(behind, out.get(m.pages[0], shape.page_size))
    for m in members:
        for page in m.pages[1:]:
            out.pop(page, None)
    return {page: n for page, n in out.items() if n}
