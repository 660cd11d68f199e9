"""Paged decode: one query token per sequence over a KV cache in pages, split along the sequence.

``out = softmax(scale * q K^T) V`` per query head, with K and V read through a block table (Kwon et al., arXiv
2309.06180), grouped query heads packed into one tile (Ainslie et al., arXiv 2305.13245), optional sliding
window and soft-cap, and the sequence cut into splits merged by `decode_combine` (Flash-Decoding). Formats:
16-bit and float32 pages, FP8 with V transposed, INT8, NVFP4, and KIVI 4/2-bit pages beside an open 16-bit
page; layouts in `workbench.kernels.layouts`. Deterministic: no atomics, and what a split holds depends on its
sequence and ``chunk`` alone, so with a given ``chunk`` a sequence's bits do not depend on its batch.

FLOPs 4 H D per token of context; bytes are those of the cached K and V (`PageLayout.bytes_per_token`): the
kernel is bound by bandwidth, and at up to 16 query heads per KV head mma.sync (HMMA) is the right unit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from workbench.kernels.attention import paged_builds
from workbench.kernels.attention.decode_combine import decode_combine
from workbench.kernels.attention.paged_checks import check_numbers, check_pages
from workbench.kernels.attention.paged_launch import OpenPages, launch, split_unit
from workbench.kernels.attention.paged_result import Attended
from workbench.kernels.attention.splits import chunk_tokens, multiprocessors, split_count
from workbench.kernels.checks import (
    require,
    require_contiguous,
    require_device,
    require_dtype,
    require_runnable,
    require_shape,
)
from workbench.kernels.layouts.pages import PageLayout

__all__ = ["KERNELS", "Attended", "OpenPages", "paged_decode", "reference"]

KERNELS = paged_builds.KERNELS

_CODED = ("fp8", "int8", "nvfp4", "kivi2_", "kivi4_")


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition in float64: out [B, H, D] and log-sum-exp [B, H].

    ``q`` [B, H, D]; ``k``, ``v`` [pages, KV heads, P, D], any float dtype (coded pages decoded by their
    layout's ``read``); ``table`` int [B, pages per sequence]; ``lengths`` int [B]. The query stands at
    the last token.
    """
    dim, page, group = q.shape[-1], k.shape[2], q.shape[1] // k.shape[1]
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -torch.inf).double()
    for b, n in enumerate(lengths.tolist()):
        seen = torch.arange(max(0, n - window) if window is not None else 0, n)
        if not len(seen):
            continue
        pages = table[b, : -(-n // page)].long().cpu()[seen // page]
        keys, values = (x.cpu()[pages, :, seen % page].double().repeat_interleave(group, 1) for x in (k, v))
        s = torch.einsum("hd,nhd->hn", q[b].cpu().double(), keys) * (dim**-0.5 if scale is None else scale)
        if soft_cap is not None:
            s = soft_cap * torch.tanh(s / soft_cap)
        out[b] = torch.einsum("hn,nhd->hd", s.softmax(-1), values)
        lse[b] = s.logsumexp(-1)
    return out.to(q.device), lse.to(q.device)


def paged_decode(
    q: Tensor,
    planes: Mapping[str, Tensor],
    layout: PageLayout,
    table: Tensor,
    lengths: Tensor,
    *,
    longest: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    tensor_scales: tuple[float, float] = (1.0, 1.0),
    open_pages: OpenPages | None = None,
    chunk: int | None = None,
    tma: bool | None = None,
) -> Attended:
    """Attend from the last token of each sequence to all of its cached tokens.

    ``q`` [B, H, D]; ``planes`` of one layer as ``layout`` allocates them; ``table`` int32 [B, pages],
    ``lengths`` int32 [B] (0: output 0, log-sum-exp -inf). ``longest`` saves reading the lengths back.
    ``tensor_scales``: NVFP4's K and V. ``chunk`` fixes the tokens of a split (a multiple of page and 64) and
    with it the bits, whatever the batch. ``tma`` None: where the pages allow it.
    Raises ``UnsupportedInput`` for whatever lies outside this table; nothing falls back in silence.
    """
    require_runnable("paged_decode", q)
    check_pages(q, planes, layout, table, lengths, formats=_CODED)
    check_numbers(window, soft_cap)
    require(len(q) == len(lengths), f"{len(q)} queries do not fit {len(lengths)} sequences.", "One each.")
    if open_pages is not None:
        _check_open(q, layout, open_pages)
    batch, heads, dim = q.shape
    if longest is None:
        longest = int(lengths.max()) if batch else 0
    require(
        longest <= table.shape[1] * layout.page,
        f"{longest} tokens do not fit a block table of {table.shape[1]} pages of {layout.page}.",
    )
    # A window touches at most one page more than it fills.
    reach = longest if window is None else min(longest, window + layout.page)
    chunk = chunk if chunk is not None else _chunk(q, layout, longest, reach)
    unit = split_unit(layout)
    require(chunk > 0 and chunk % unit == 0, f"chunk = {chunk} cannot be used.", f"Multiples of {unit} can.")
    splits = max(1, -(-reach // chunk))
    group = heads // layout.heads
    kind = q.dtype if splits == 1 else torch.float32
    out = torch.empty((batch, heads, splits, dim), dtype=kind, device=q.device)
    lse = torch.empty((batch, heads, splits), dtype=torch.float32, device=q.device)
    if not batch:
        return Attended(out[:, :, 0], lse[:, :, 0], "nothing to do")
    numbers = {
        "scale": dim**-0.5 if scale is None else scale,
        "cap": soft_cap or 0.0,
        "window": window or 0,
        "chunk": chunk,
        "stride_q": q.stride(0),
        "stride_table": table.stride(0),
        "KVH": layout.heads,
        "G": group,
        "BM": max(16, triton.next_power_of_2(group)),
        "WINDOW": window is not None,
        "CAP": soft_cap is not None,
    }
    grid = (batch, layout.heads, splits)
    path = launch(
        grid, out, lse, q, planes, layout, (table, lengths), numbers, tensor_scales, open_pages, tma
    )
    if splits == 1:
        return Attended(out[:, :, 0], lse[:, :, 0], path)
    return Attended(*decode_combine(out, lse, q.dtype), f"{path}, {splits} splits")


def _chunk(q: Tensor, layout: PageLayout, longest: int, reach: int) -> int:
    """Tokens of a split by the heuristics of `splits`."""
    unit = split_unit(layout)
    head_bytes = int(longest * layout.bytes_per_token() / layout.heads)
    splits = split_count(
        len(q) * layout.heads, -(-reach // unit), head_bytes=head_bytes, sms=multiprocessors(q.device)
    )
    return chunk_tokens(reach, splits, unit)


def _check_open(q: Tensor, layout: PageLayout, newest: OpenPages) -> None:
    row = (layout.heads, layout.page, layout.dim)
    for name, x in (("open k", newest.k), ("open v", newest.v)):
        require_dtype(name, x, (q.dtype,))
        require_shape(name, x, (len(x), *row))
        require_contiguous(name, x)
    for name, x in (("coded", newest.coded), ("row", newest.row)):
        require_dtype(name, x, (torch.int32,))
        require_shape(name, x, (len(q),))
        require_contiguous(name, x)
    require_device(q, k=newest.k, v=newest.v, coded=newest.coded, row=newest.row)
