"""INT8 pages: symmetric codes ``k``, ``v`` [kv_head, token, dim] with a float16 scale per token and head."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.kernels.layouts.kv_plain import AXES
from workbench.kernels.layouts.pages import PageLayout, Plane, scatter
from workbench.numerics.affine import symmetric_scale

TOP = 127.0


def layout(page: int, heads: int, dim: int) -> PageLayout:
    """Pages of ``page`` tokens: int8 ``k``, ``v``; float16 ``k_scale``, ``v_scale`` [head, token]."""
    payload = tuple(Plane(name, torch.int8, (heads, page, dim), AXES) for name in ("k", "v"))
    scales = tuple(Plane(f"{p.name}_scale", torch.float16, (heads, page), AXES[:2]) for p in payload)
    return PageLayout("int8", page, heads, dim, payload + scales)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int8 [..., D] and scales float16 [...]: amax / 127 rounded up, then round(x / scale)."""
    x = x.float()
    scale = symmetric_scale(x.abs().amax(-1, keepdim=True), TOP)
    return (x / scale.float()).round_().clamp_(-TOP, TOP).to(torch.int8), scale.squeeze(-1)


def write(planes: Mapping[str, Tensor], slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Quantize rows ``k``, ``v`` [T, H, D] into slots (int64 [T])."""
    for name, rows in (("k", k), ("v", v)):
        codes, scale = quantize(rows)
        scatter(planes[name], slots, codes)
        scatter(planes[f"{name}_scale"], slots, scale)


def read(planes: Mapping[str, Tensor], pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V (float32 [n, H, P, D]) of pages (int64 [n])."""
    k, v = (planes[n][pages].float() * planes[f"{n}_scale"][pages].float()[..., None] for n in ("k", "v"))
    return k, v
