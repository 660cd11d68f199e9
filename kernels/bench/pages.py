"""Filled KV caches for decode problems: every format, scattered pages, NaN in slots that no token owns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.bench.case import Lab
from workbench.kernels.layouts import kv_fp4, kv_fp8, kv_int8, kv_kivi, kv_plain
from workbench.kernels.layouts.pages import PageLayout

Planes = dict[str, Tensor]
#: NVFP4's tensor scales of K and V: standard normal rows have an amax near 4, and 6 * 448 is the format's.
TENSOR_SCALES = (4.5 / (6 * 448), 4.5 / (6 * 448))
_LAYOUTS: dict[str, Callable[..., PageLayout]] = {
    "bf16": kv_plain.layout,
    "fp8": kv_fp8.layout,
    "int8": kv_int8.layout,
    "nvfp4": kv_fp4.layout,
    "kivi4": lambda *a: kv_kivi.layout(*a, bits=4),
    "kivi2": lambda *a: kv_kivi.layout(*a, bits=2),
}
_WRITERS: dict[str, Callable[..., None]] = {
    "bf16": kv_plain.write,
    "fp8": kv_fp8.write,
    "int8": kv_int8.write,
    "nvfp4": lambda *a: kv_fp4.write(*a, scales=TENSOR_SCALES),
}
_READERS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "bf16": kv_plain.read,
    "fp8": kv_fp8.read,
    "int8": kv_int8.read,
    "nvfp4": lambda *a: kv_fp4.read(*a, scales=TENSOR_SCALES),
    "kivi4": kv_kivi.read,
    "kivi2": kv_kivi.read,
}
_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class Cache:
    """Planes of one layer, block table int32 [B, pages], lengths int32 [B]."""

    format: str
    layout: PageLayout
    planes: Planes
    table: Tensor
    lengths: Tensor

    def decoded(self) -> tuple[Tensor, Tensor]:
        """K and V float32 [pages, H, P, D] as the format stores them."""
        return _READERS[self.format](
            self.planes, torch.arange(len(self.planes["k"]), device=self.table.device)
        )

    @property
    def options(self) -> dict[str, Any]:
        """What the format wants to be told at a call."""
        return {"tensor_scales": TENSOR_SCALES} if self.format == "nvfp4" else {}


def layout_of(format: str, page: int, heads: int, dim: int) -> PageLayout:
    """The page layout of a format: bf16, fp8, int8, nvfp4, kivi4 or kivi2."""
    return _LAYOUTS[format](page, heads, dim)


def filled(lab: Lab, format: str, page: int, heads: int, dim: int, lengths: Sequence[int]) -> Cache:
    """A cache with fresh tokens; KIVI's, which encodes whole pages, holds whole pages only."""
    layout = layout_of(format, page, heads, dim)
    table, pool = _tables(lab, lengths, page)
    planes = layout.allocate(pool, lab.device)
    poison(planes)
    if format.startswith("kivi"):
        for some in torch.arange(pool, device=lab.device).split(max(1, _AT_ONCE // page)):
            k, v = (lab.normal(len(some), heads, page, dim) for _ in range(2))
            kv_kivi.write(planes, some, k, v)
    else:
        for slots in _slots(table, lengths, page).split(_AT_ONCE):
            k, v = (lab.normal(len(slots), heads, dim) for _ in range(2))
            _WRITERS[format](planes, slots, k, v)
    counts = torch.tensor(list(lengths), dtype=torch.int32, device=lab.device)
    return Cache(format, layout, planes, table, counts)


def _tables(lab: Lab, lengths: Sequence[int], page: int) -> tuple[Tensor, int]:
    """Scattered pages, and the size of the pool; unused entries of the table are page 0, owned by none."""
    counts = [-(-n // page) for n in lengths]
    pool = sum(counts) + 3
    order = 1 + lab.order(pool - 1).int()
    table = torch.zeros(len(lengths), max(1, *counts), dtype=torch.int32, device=lab.device)
    used = 0
    for b, count in enumerate(counts):
        table[b, :count] = order[used : used + count]
        used += count
    return table, pool


def _slots(table: Tensor, lengths: Sequence[int], page: int) -> Tensor:
    """Slots ``page * P + offset`` of all tokens, sequence after sequence, int64."""
    found = []
    for b, n in enumerate(lengths):
        token = torch.arange(n, device=table.device)
        found.append(table[b].long()[token // page] * page + token % page)
    return torch.cat(found)


def poison(planes: Planes) -> None:
    """NaN wherever a plane can hold one, large bytes elsewhere."""
    for plane in planes.values():
        plane.view(torch.uint8).fill_(0x7F) if plane.dtype.itemsize == 1 else plane.fill_(torch.nan)
