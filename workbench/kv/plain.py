"""Uncompressed KV: planes ``k`` and ``v`` in the dtype attention computes on.

The engine's own format, not a technique: every other format is measured against it. Pages are
head-major (``[Hkv, P, D]``), so one head's keys of a page are one contiguous block and attention
reads the planes where they lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.kv.constants import NoConstants
from workbench.kv.rows import RowIndex
from workbench.spec.errors import OptionError

_AXES = ("head", "slot", "dim")


@dataclass(frozen=True)
class PlainCodec(NoConstants):
    """K and V as they are, rounded once to ``dtype`` on write."""

    dtype: torch.dtype
    grain: Literal["token", "page"] = "token"
    in_place: bool = True
    kernels: CDLL | None = field(default=None, compare=False, repr=False)
    """The compiled kernels, which write the same bytes in one pass; None writes in torch."""
    _rows: RowIndex = field(default_factory=RowIndex, compare=False, repr=False)

    @property
    def key(self) -> str:
        """``plain`` and the dtype, e.g. ``plain/bfloat16``."""
        return f"plain/{str(self.dtype).removeprefix('torch.')}"

    def planes(self, geometry: PageGeometry) -> tuple[PlaneSpec, ...]:
        """``k`` and ``v`` [Hkv, P, D]; raises :class:`OptionError` when the geometry has another dtype."""
        if geometry.dtype != self.dtype:
            raise OptionError(
                f"This plain KV format holds {self.dtype}, but attention computes on {geometry.dtype}.",
                hint="Build PlainCodec with the geometry's dtype.",
            )
        shape = (geometry.kv_heads, geometry.page_size, geometry.head_dim)
        return PlaneSpec("k", self.dtype, shape, _AXES), PlaneSpec("v", self.dtype, shape, _AXES)

    def page_sizes(self, head_dim: int) -> None:
        """Any page size works."""
        return None

    def encode(self, planes: Mapping[str, Tensor], where: Tensor, k: Tensor, v: Tensor) -> None:
        """Write rows ``k``, ``v`` [T, Hkv, D] to slots ``where`` int64 [T]."""
        _, heads, size, dim = planes["k"].shape
        if self.kernels is not None and _fused(k, v) and self.dtype is torch.bfloat16:
            to_k, to_v = planes["k"].data_ptr(), planes["v"].data_ptr()
            self.kernels.write_kv(
                heads,
                size,
                dim,
                len(where),
                where.data_ptr(),
                k.data_ptr(),
                v.data_ptr(),
                k.stride(0),
                to_k,
                to_v,
            )
            return
        rows = self._rows(where, heads, size)
        planes["k"].view(-1, dim).index_copy_(0, rows, k.to(self.dtype).reshape(-1, dim))
        planes["v"].view(-1, dim).index_copy_(0, rows, v.to(self.dtype).reshape(-1, dim))

    def decode(self, planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
        """Copy pages (int64 [n]) into ``k`` and ``v`` [n, Hkv, P, D]."""
        k.copy_(planes["k"].index_select(0, pages))
        v.copy_(planes["v"].index_select(0, pages))


def _fused(k: Tensor, v: Tensor) -> bool:
    """Whether rows are as a compiled layer leaves them: float32, heads side by side, one stride for both."""
    wide = k.dtype is torch.float32 and v.dtype is torch.float32
    dim = k.shape[2]
    return wide and k.stride() == v.stride() and k.stride()[1:] == (dim, 1)
