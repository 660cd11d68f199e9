"""Uncompressed pages: planes ``k`` and ``v`` [kv_head, token, dim] in 16 bits (or float32, for oracles)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.kernels.layouts.pages import PageLayout, Plane, scatter

AXES = ("head", "token", "dim")


def layout(page: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> PageLayout:
    """Pages of ``page`` tokens; named after the dtype, e.g. ``bfloat16``."""
    planes = tuple(Plane(name, dtype, (heads, page, dim), AXES) for name in ("k", "v"))
    return PageLayout(str(dtype).removeprefix("torch."), page, heads, dim, planes)


def write(planes: Mapping[str, Tensor], slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write rows ``k``, ``v`` [T, H, D] to slots (int64 [T])."""
    scatter(planes["k"], slots, k.to(planes["k"].dtype))
    scatter(planes["v"], slots, v.to(planes["v"].dtype))


def read(planes: Mapping[str, Tensor], pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V (float32 [n, H, P, D]) of pages (int64 [n])."""
    return planes["k"][pages].float(), planes["v"][pages].float()
