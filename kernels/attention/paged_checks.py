"""What the paged attention kernels take, checked before anything is launched."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from workbench.kernels.attention.paged_launch import PLAIN
from workbench.kernels.checks import (
    require,
    require_contiguous,
    require_device,
    require_dtype,
    require_shape,
)
from workbench.kernels.layouts.pages import PageLayout

#: Head sizes of coded formats; plain pages take any up to 256.
_CODED_DIMS = (64, 128, 256)
_MOST_GROUP = 64


def check_numbers(window: int | None, soft_cap: float | None) -> None:
    """Raise ``UnsupportedInput`` for a window or a soft-cap that means nothing."""
    require(window is None or window >= 1, f"window = {window} cannot be used.", "At least 1, or None.")
    require(soft_cap is None or soft_cap > 0, f"soft_cap = {soft_cap} cannot be used.", "Above 0, or None.")


def check_pages(
    q: Tensor,
    planes: Mapping[str, Tensor],
    layout: PageLayout,
    table: Tensor,
    lengths: Tensor,
    *,
    formats: Collection[str],
) -> None:
    """Raise ``UnsupportedInput`` for queries, planes, block table or lengths outside the kernels' table.

    ``formats``: coded formats the caller reads, beside the plain ones. ``lengths`` int32, one per sequence.
    """
    plain = layout.format in PLAIN
    known = plain or layout.format in formats or layout.format.split("_")[0] + "_" in formats
    require(
        known,
        f"This kernel does not read {layout.format} pages.",
        f"It reads {', '.join((*PLAIN, *(f.strip('_') for f in formats)))}; FP8 pages must not be permuted.",
    )
    require_dtype("q", q, (PLAIN[layout.format],) if plain else (torch.bfloat16, torch.float16))
    require(q.dim() == 3, f"q is {tuple(q.shape)}.", "It takes [rows, heads, head size].")
    rows, heads, dim = q.shape
    require_shape("q", q, (rows, heads, layout.dim))
    require(
        q.stride(2) == 1 and q.stride(1) == dim,
        f"q is a view with strides {q.stride()}.",
        "Its heads must lie side by side: pass q.contiguous().",
    )
    require(
        dim <= 256 and (plain or dim in _CODED_DIMS),
        f"Head size {dim} is not supported for {layout.format} pages.",
        f"Coded pages take {_CODED_DIMS}, plain ones up to 256.",
    )
    require(
        heads % layout.heads == 0 and heads // layout.heads <= _MOST_GROUP,
        f"{heads} query heads do not go with {layout.heads} KV heads.",
        f"It takes a whole number of query heads per KV head, up to {_MOST_GROUP}.",
    )
    if q.is_cuda and layout.format == "fp8":
        require(
            torch.cuda.get_device_capability(q.device) >= (8, 9),
            f"{torch.cuda.get_device_name(q.device)} has no FP8 conversions.",
            "Use INT8 or 16-bit pages.",
        )
    layout.check(planes)
    require(
        all(x.data_ptr() % 16 == 0 for x in planes.values()),
        "The planes do not begin at a multiple of 16 bytes.",
        "Allocate the planes with the layout's allocate().",
    )
    batch = len(lengths)
    require_dtype("table", table, (torch.int32,))
    require_dtype("lengths", lengths, (torch.int32,))
    require(table.dim() == 2 and len(table) == batch, f"table is {tuple(table.shape)}.", f"[{batch}, pages].")
    require(table.stride(1) == 1, "table is a transposed view.", "Pass table.contiguous().")
    require_shape("lengths", lengths, (batch,))
    require_contiguous("lengths", lengths)
    require_device(q, table=table, lengths=lengths, **dict(planes))
