"""FP4 pages: E2M1 codes in blocks along the head dim, NVFP4 or MXFP4 scales.

NVFP4: 16 elements share an E4M3 scale, under one float32 scale per tensor that is fixed beforehand
(``amax / (6 * 448)`` from calibration; without it small layers fall into E4M3's subnormals). MXFP4: 32
elements share a power of two. A token's bytes depend on that token alone. Byte ``i`` of a row holds dims
``i`` (low bits) and ``i + D/2``: both halves are contiguous tiles, and Q K^T and P V split into two products
without unpacking to interleaved order. 4.5 bits an element (NVFP4), 4.25 (MXFP4), scales counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from workbench.kernels.layouts.kv_plain import AXES
from workbench.kernels.layouts.pages import PageLayout, Plane, require_multiple, scatter
from workbench.numerics import e2m1, e8m0
from workbench.numerics.e4m3 import LARGEST, from_e4m3, to_e4m3
from workbench.numerics.packing import unpack

Kind = Literal["nvfp4", "mxfp4"]
BLOCK: dict[str, int] = {"nvfp4": 16, "mxfp4": 32}
SMALLEST_SCALE = 2.0**-9  # E4M3's smallest subnormal: a block scale is never 0
_E2M1_TOP_EXPONENT = 2  # floor(log2 6)


def layout(page: int, heads: int, dim: int, kind: Kind = "nvfp4") -> PageLayout:
    """Codes ``k``, ``v`` uint8 [H, P, D/2]; block scales ``k_scale``, ``v_scale`` [H, P, D/block].

    Scales are ``float8_e4m3fn`` for NVFP4 and uint8 exponents for MXFP4.
    """
    require_multiple("head size", dim, 2 * BLOCK[kind], kind)
    scale = torch.float8_e4m3fn if kind == "nvfp4" else torch.uint8
    codes = tuple(Plane(n, torch.uint8, (heads, page, dim // 2), AXES) for n in ("k", "v"))
    scales = tuple(Plane(f"{n}_scale", scale, (heads, page, dim // BLOCK[kind]), AXES) for n in ("k", "v"))
    return PageLayout(kind, page, heads, dim, codes + scales)


def quantize(x: Tensor, kind: Kind, tensor_scale: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Packed codes uint8 [..., D/2] and block scales [..., D/block] of rows ``x`` [..., D].

    The block scale is rounded to its stored format first, and the codes are computed with it.
    ``tensor_scale`` applies to NVFP4: ``value = code * block scale * tensor_scale``; a tensor is one per row,
    float32 [..., 1, 1].
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK[kind]))
    amax = blocks.abs().amax(-1, keepdim=True)
    if kind == "nvfp4":
        scale = to_e4m3((amax / (e2m1.LARGEST * tensor_scale)).clamp(SMALLEST_SCALE, LARGEST))
        factor = from_e4m3(scale) * tensor_scale
    else:
        scale = e8m0.block_scale(amax, _E2M1_TOP_EXPONENT)
        factor = e8m0.from_e8m0(scale)
    codes = e2m1.to_e2m1(blocks / factor).flatten(-2)
    low, high = codes.chunk(2, -1)  # the layout of ``pack``, whose checks cost more than a row does
    return low | (high << 4), scale.squeeze(-1)


def dequantize(codes: Tensor, scale: Tensor, kind: Kind, tensor_scale: float = 1.0) -> Tensor:
    """Values (float32 [..., D]) of packed codes [..., D/2] and block scales [..., D/block]."""
    values = e2m1.from_e2m1(unpack(codes, 4, 2 * codes.shape[-1])).unflatten(-1, (-1, BLOCK[kind]))
    factor = from_e4m3(scale) * tensor_scale if kind == "nvfp4" else e8m0.from_e8m0(scale)
    return (values * factor[..., None]).flatten(-2)


def write(
    planes: Mapping[str, Tensor],
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    kind: Kind = "nvfp4",
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Quantize rows ``k``, ``v`` [T, H, D] into slots (int64 [T]); ``scales``: tensor scales of K and V."""
    for name, rows, tensor_scale in (("k", k, scales[0]), ("v", v, scales[1])):
        codes, scale = quantize(rows, kind, tensor_scale)
        scatter(planes[name], slots, codes)
        scatter(planes[f"{name}_scale"], slots, scale)


def read(
    planes: Mapping[str, Tensor],
    pages: Tensor,
    kind: Kind = "nvfp4",
    scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[Tensor, Tensor]:
    """K and V (float32 [n, H, P, D]) of pages (int64 [n])."""
    found = []
    for name, tensor_scale in zip(("k", "v"), scales, strict=True):
        plane = planes[f"{name}_scale"]
        scale = plane.view(torch.uint8)[pages].view(plane.dtype)
        found.append(dequantize(planes[name][pages], scale, kind, tensor_scale))
    return found[0], found[1]
