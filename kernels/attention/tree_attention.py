"""Tree attention: a step's rows (drafts, chunks of a chain) over the pages of their sequences.

``out_i = softmax(scale * q_i K^T) V`` over the cached tokens of row i's sequence, row i itself and the rows
it descends from (SpecInfer, arXiv 2305.09781, section 4.2). The step's keys and values are already in their
slots, after the cached ones. Which of them a row sees is a bit each in its ancestor words (`layouts.tree`).
Rows that only look back (no own keys) give the shared-prefix half of a cascade. Formats: plain, FP8 and INT8
pages; window, soft-cap, splits and determinism as in `paged_decode`.

FLOPs 4 H D (context + rows) per row; bytes those of the cached K and V, once per block of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from workbench.kernels.attention import tree_builds
from workbench.kernels.attention.decode_combine import decode_combine
from workbench.kernels.attention.paged_checks import check_numbers, check_pages
from workbench.kernels.attention.paged_launch import SHORT, TILE, plan_tiles, split_unit, stages
from workbench.kernels.attention.paged_result import Attended
from workbench.kernels.attention.splits import chunk_tokens, multiprocessors, split_count
from workbench.kernels.attention.tree_kernel import tree_attention_kernel
from workbench.kernels.checks import require, require_contiguous, require_device, require_runnable
from workbench.kernels.layouts.pages import PageLayout
from workbench.kernels.layouts.tree import TreeRows, unpack

KERNEL = tree_builds.KERNEL


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    starts: Tensor,
    rows: TreeRows,
    *,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition in float64: out [T, H, D] and log-sum-exp [T, H].

    ``q`` [T, H, D]; ``k``, ``v`` [pages, KV heads, P, D] any float dtype; ``table`` int [B, pages];
    ``starts`` int [B] cached tokens. A cached token stands ``start + depth - token`` behind a row.
    """
    page, group = k.shape[2], q.shape[1] // k.shape[1]
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -torch.inf).double()
    for b, start in enumerate(starts.tolist()):
        first, last, own = int(rows.first[b]), int(rows.first[b + 1]), int(rows.keys[b])
        slots = torch.arange(start + own)
        at = table[b].long().cpu()[slots // page], slice(None), slots % page
        keys, values = (x.cpu()[at].double().repeat_interleave(group, 1) for x in (k, v))
        bits = unpack(rows.words[first:last].cpu(), own)
        for i in range(first, last):
            back = start + int(rows.depth[i]) - slots[:start]
            cached = back >= 0 if window is None else back < window
            seen = torch.cat([cached, bits[i - first]])
            if not bool(seen.any()):
                continue
            s = torch.einsum("hd,nhd->hn", q[i].cpu().double(), keys[seen])
            s = s * (q.shape[-1] ** -0.5 if scale is None else scale)
            if soft_cap is not None:
                s = soft_cap * torch.tanh(s / soft_cap)
            out[i] = torch.einsum("hn,nhd->hd", s.softmax(-1), values[seen])
            lse[i] = s.logsumexp(-1)
    return out.to(q.device), lse.to(q.device)


def tree_attention(
    q: Tensor,
    planes: Mapping[str, Tensor],
    layout: PageLayout,
    table: Tensor,
    starts: Tensor,
    rows: TreeRows,
    *,
    longest: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
    tma: bool | None = None,
) -> Attended:
    """Attend from the rows of a step; returns out [T, H, D], natural log-sum-exp [T, H] and the path taken.

    ``q`` [T, H, D] in the order of ``rows``; ``planes`` of one layer as ``layout`` allocates them; ``table``
    int32 [B, pages]; ``starts`` int32 [B] tokens cached before the step's own. ``longest`` saves reading the
    starts back: the largest start. ``chunk`` and ``tma`` as in `paged_decode`. With ``window``, the words
    must have been made for it (`tree_rows(..., window=...)`). Raises ``UnsupportedInput`` outside this
    table.
    """
    require_runnable("tree_attention", q)
    check_pages(q, planes, layout, table, starts, formats=("fp8", "int8"))
    check_numbers(window, soft_cap)
    _check_rows(q, rows, starts)
    total, heads, dim = q.shape
    if longest is None:
        longest = int(starts.max()) if len(starts) else 0
    reach = longest + rows.longest
    require(
        reach <= table.shape[1] * layout.page,
        f"{reach} tokens do not fit a block table of {table.shape[1]} pages of {layout.page}.",
    )
    if window is not None:
        reach = min(reach, window + layout.page + rows.longest)
    group = heads // layout.heads
    most = max(rows.counts, default=0) * group
    block = SHORT if most <= SHORT else TILE
    items = _blocks(rows.counts, max(1, block // group), q.device)
    unit = split_unit(layout)
    if chunk is None:
        splits = split_count(len(items) * layout.heads, -(-reach // unit), sms=multiprocessors(q.device))
        chunk = chunk_tokens(reach, splits, unit)
    require(chunk > 0 and chunk % unit == 0, f"chunk = {chunk} cannot be used.", f"Multiples of {unit} can.")
    splits = max(1, -(-reach // chunk))
    kind = q.dtype if splits == 1 else torch.float32
    out = torch.empty((total, heads, splits, dim), dtype=kind, device=q.device)
    lse = torch.empty((total, heads, splits), dtype=torch.float32, device=q.device)
    if not total:
        return Attended(out[:, :, 0], lse[:, :, 0], "nothing to do")
    tiles, path = plan_tiles(planes, layout, tma)
    numbers: dict[str, Any] = {
        "scale": dim**-0.5 if scale is None else scale,
        "cap": soft_cap or 0.0,
        "window": window or 0,
        "chunk": chunk,
        "stride_q": q.stride(0),
        "stride_table": table.stride(0),
        "KVH": layout.heads,
    }
    tree_attention_kernel[(len(items), layout.heads, splits)](
        out, lse, q, *tiles.tensors, table, items, starts, rows.keys, rows.depth, rows.words, **numbers,
        G=group, BM=max(block, triton.next_power_of_2(group)), BN=TILE, BT=SHORT, W=rows.words.shape[1],
        WINDOW=window is not None, CAP=soft_cap is not None, **tiles.constants,
        num_warps=4, num_stages=stages(layout, planes["k"]),
    )  # fmt: skip
    if splits == 1:
        return Attended(out[:, :, 0], lse[:, :, 0], path)
    return Attended(*decode_combine(out, lse, q.dtype), f"{path}, {splits} splits")


@lru_cache(maxsize=16)
def _blocks(counts: tuple[int, ...], at_once: int, device: torch.device) -> Tensor:
    """Row blocks int32 [n, 3]: sequence, first row, rows of the sequence from there on.

    The layers of a step ask for the same blocks: they are sent to the device once.
    """
    found, first = [], 0
    for b, n in enumerate(counts):
        found += [(b, first + i, n - i) for i in range(0, n, at_once)]
        first += n
    return torch.tensor(found, dtype=torch.int32).view(-1, 3).to(device)


def _check_rows(q: Tensor, rows: TreeRows, starts: Tensor) -> None:
    require(
        len(rows.counts) == len(starts) and sum(rows.counts) == len(q),
        f"{len(q)} queries of {len(starts)} sequences are not {sum(rows.counts)} rows of {len(rows.counts)}.",
    )
    for name, x in (("depth", rows.depth), ("words", rows.words), ("keys", rows.keys)):
        require_contiguous(name, x)
    require_device(q, depth=rows.depth, words=rows.words, keys=rows.keys)
