"""KIVI pages: 4- or 2-bit codes, keys grouped per channel over tokens, values per token over channels.

Liu et al. (arXiv 2402.02750). A value is ``minimum + code * step``, both float16, in float32 arithmetic.
Codes are packed along tokens in halves or quarters: of keys within each group (byte row ``i`` of a group of G
tokens holds tokens ``i + p * G * bits / 8`` in bits ``p * bits`` and up), of values within the whole page. So
a tile unpacks by shifts into parts that are consecutive tokens, and nothing is interleaved. Pages are encoded
when full; the newest tokens stay in 16 bits beside them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workbench.kernels.layouts.pages import PageLayout, Plane, require_multiple
from workbench.numerics.affine import affine_codes, affine_parameters, affine_values
from workbench.numerics.packing import pack, unpack
from workbench.spec.errors import UnsupportedInput


def layout(page: int, heads: int, dim: int, *, bits: int = 4, group: int = 32) -> PageLayout:
    """Codes ``k`` [H, P/G, G*bits/8, D] and ``v`` [H, P*bits/8, D] uint8, float16 minimum and step per group.

    Parameters: ``k_min``, ``k_step`` [H, P/G, 1, D]; ``v_min``, ``v_step`` [H, P, D/G, 1].
    """
    if bits not in (2, 4):
        raise UnsupportedInput(f"KIVI packs 2 or 4 bits, not {bits}.", hint="Choose bits = 4 or 2.")
    require_multiple("group", group, 8, "kivi")
    require_multiple("page size", page, group, "kivi")
    require_multiple("head size", dim, group, "kivi")
    half, byte = torch.float16, torch.uint8
    k_axes, v_axes = ("head", "group", "token", "dim"), ("head", "token", "group", "dim")
    planes = (
        Plane("k", byte, (heads, page // group, group * bits // 8, dim), ("head", "group", "byte", "dim")),
        Plane("v", byte, (heads, page * bits // 8, dim), ("head", "byte", "dim")),
        *(Plane(n, half, (heads, page // group, 1, dim), k_axes) for n in ("k_min", "k_step")),
        *(Plane(n, half, (heads, page, dim // group, 1), v_axes) for n in ("v_min", "v_step")),
    )
    return PageLayout(f"kivi{bits}_{group}", page, heads, dim, planes, block=page)


def write(planes: Mapping[str, Tensor], pages: Tensor, k: Tensor, v: Tensor) -> None:
    """Encode whole pages ``k``, ``v`` [n, H, P, D] into pages (int64 [n]); widths follow from the planes."""
    n, heads, size, dim = k.shape
    groups, group, bits = _sizes(planes, size)
    x = k.float().reshape(n, heads, groups, group, dim)
    low, step = affine_parameters(x.amin(3, keepdim=True), x.amax(3, keepdim=True), bits)
    planes["k"][pages] = pack(affine_codes(x, low, step, bits), bits, 3)
    planes["k_min"][pages], planes["k_step"][pages] = low, step
    x = v.float().reshape(n, heads, size, dim // group, group)
    low, step = affine_parameters(x.amin(4, keepdim=True), x.amax(4, keepdim=True), bits)
    planes["v"][pages] = pack(affine_codes(x, low, step, bits).view(n, heads, size, dim), bits, 2)
    planes["v_min"][pages], planes["v_step"][pages] = low, step


def read(planes: Mapping[str, Tensor], pages: Tensor) -> tuple[Tensor, Tensor]:
    """K and V (float32 [n, H, P, D]) of pages (int64 [n])."""
    n, (heads, size, channel_groups, _) = len(pages), planes["v_min"].shape[1:]
    _, group, bits = _sizes(planes, size)
    codes = unpack(planes["k"][pages], bits, group, 3)
    k = affine_values(codes, planes["k_min"][pages], planes["k_step"][pages]).reshape(n, heads, size, -1)
    codes = unpack(planes["v"][pages], bits, size, 2).reshape(n, heads, size, channel_groups, group)
    v = affine_values(codes, planes["v_min"][pages], planes["v_step"][pages]).reshape(n, heads, size, -1)
    return k, v


def _sizes(planes: Mapping[str, Tensor], size: int) -> tuple[int, int, int]:
    """Key groups of a page, tokens of a group, bits of a code."""
    groups, rows = planes["k"].shape[2:4]
    return groups, size // groups, rows * 8 * groups // size
