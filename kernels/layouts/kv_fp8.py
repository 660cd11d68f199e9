"""FP8 E4M3 pages: K as rows, V transposed, a float16 scale per token and head.

An 8-bit product on Hopper needs both operands contiguous along the summed axis. For Q K^T that is the head
dim, so K lies as rows; for P V it is the tokens, so V lies as V^T ``[kv_head, dim, token]``. Stored as rows,
V costs 64 byte-wide shared-memory loads per step, the usual reason for FP8 caches slower than 16 bits. With
``permuted`` the tokens of V^T are in the order of `permute`, as the FP8 prefill kernel reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.kernels.layouts import permute
from workbench.kernels.layouts.kv_plain import AXES
from workbench.kernels.layouts.pages import PageLayout, Plane, require_multiple, scatter
from workbench.numerics.affine import symmetric_scale
from workbench.numerics.e4m3 import LARGEST, from_e4m3, to_e4m3

E4M3 = torch.float8_e4m3fn


def layout(page: int, heads: int, dim: int, *, permuted: bool = False) -> PageLayout:
    """Pages of ``page`` tokens (a multiple of 16): ``k`` [head, token, dim], ``v`` [head, dim, token].

    Scales ``k_scale``, ``v_scale`` float16 [head, token] stay in the order of the tokens.
    """
    require_multiple("page size", page, permute.BLOCK, "fp8")
    planes = (
        Plane("k", E4M3, (heads, page, dim), AXES),
        Plane("v", E4M3, (heads, dim, page), ("head", "dim", "token")),
        *(Plane(f"{n}_scale", torch.float16, (heads, page), AXES[:2]) for n in ("k", "v")),
    )
    return PageLayout("fp8_permuted" if permuted else "fp8", page, heads, dim, planes)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [..., D] and scales float16 [...]: scale = amax / 448 rounded up, so nothing saturates."""
    x = x.float()
    scale = symmetric_scale(x.abs().amax(-1, keepdim=True), LARGEST)
    return to_e4m3(x / scale.float()), scale.squeeze(-1)


def write(
    planes: Mapping[str, Tensor], slots: Tensor, k: Tensor, v: Tensor, *, permuted: bool = False
) -> None:
    """Quantize rows ``k``, ``v`` [T, H, D] into slots (int64 [T])."""
    codes, scale = quantize(k)
    scatter(planes["k"], slots, codes)
    scatter(planes["k_scale"], slots, scale)
    codes, scale = quantize(v)
    scatter(planes["v_scale"], slots, scale)
    size = planes["v"].shape[3]
    token = slots % size
    if permuted:
        order = torch.tensor(permute.columns(), device=slots.device)
        token = token // permute.BLOCK * permute.BLOCK + order[token % permute.BLOCK]
    planes["v"].view(torch.uint8)[slots // size, :, :, token] = codes.view(torch.uint8)


def read(planes: Mapping[str, Tensor], pages: Tensor, *, permuted: bool = False) -> tuple[Tensor, Tensor]:
    """K and V (float32 [n, H, P, D]) of pages (int64 [n]), tokens in order."""
    k = from_e4m3(_take(planes["k"], pages)) * planes["k_scale"][pages].float()[..., None]
    v = from_e4m3(_take(planes["v"], pages))
    if permuted:
        v = permute.restore(v)
    return k, v.mT.contiguous() * planes["v_scale"][pages].float()[..., None]


def _take(plane: Tensor, pages: Tensor) -> Tensor:
    return plane.view(torch.uint8)[pages].view(plane.dtype)
