"""Coding and decoding of pages by compiled kernels: the bits that torch gives, in one pass.

Used where the ``compiled`` technique brought the kernels and attention computes in bfloat16; which of the two
does it is a matter of speed only.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import CDLL
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

_WIDEST_HEAD = 512  # what a kernel keeps of a group's parameters


def kernels_of(context: Any) -> CDLL | None:
    """The kernels of the context that a format is bound with, if there are some."""
    return getattr(context, "kernels", None)


def usable(kernels: CDLL | None, out: Tensor) -> TypeGuard[CDLL]:
    """Whether pages can be decoded to ``out`` [n, Hkv, P, D] by the kernels."""
    fits = out.dtype == torch.bfloat16 and out.shape[-1] <= _WIDEST_HEAD and out.is_contiguous()
    return kernels is not None and fits


def rows_usable(kernels: CDLL | None, *rows: Tensor) -> TypeGuard[CDLL]:
    """Whether rows [T, Hkv, D] can be coded by the kernels: heads lie side by side."""
    return kernels is not None and all(
        x.dtype in (torch.bfloat16, torch.float32) and x.stride(2) == 1 and x.stride(1) == x.shape[2]
        for x in rows
    )


def encode_bytes(kernels: CDLL, x: Tensor, where: Tensor, codes: Tensor, scale: Tensor) -> None:
    """Rows ``x`` [T, Hkv, D] to slots ``where`` int64 [T] of ``codes`` [N, Hkv, P, D], int8 or E4M3.

    ``scale`` float16 [N, Hkv, P] gets that of each row's largest element.
    """
    rows, heads, dim = x.shape
    kernels.encode_bytes(
        codes.dtype == torch.int8,
        x.dtype == torch.float32,
        *(x.data_ptr(), x.stride(0), where.data_ptr()),
        *(rows, heads, codes.shape[2], dim),
        *(codes.data_ptr(), scale.data_ptr()),
        torch.get_num_threads(),
    )


def decode_bytes(
    kernels: CDLL, codes: Tensor, scale: Tensor | None, steps: Tensor | None, pages: Tensor, out: Tensor
) -> None:
    """``codes`` [N, Hkv, P, D] int8 or E4M3, times float16 ``scale`` [N, Hkv, P] or float32 ``steps``."""
    n, heads, slots, dim = out.shape
    if scale is None and steps is None:
        steps = _ones(heads)
    kernels.decode_bytes(
        codes.dtype == torch.int8,
        codes.data_ptr(),
        None if scale is None else scale.data_ptr(),
        None if steps is None else steps.data_ptr(),
        pages.data_ptr(),
        *(n, heads, slots, dim),
        out.data_ptr(),
        torch.get_num_threads(),
    )


def decode_nibbles(
    kernels: CDLL, codes: Tensor, scale: Tensor, table: Tensor, pages: Tensor, out: Tensor
) -> None:
    """E2M1 ``codes`` [N, Hkv, P, D/2] times ``table`` float32 [256] of ``scale`` bytes [N, Hkv, P, D/B]."""
    n, heads, slots, dim = out.shape
    kernels.decode_nibbles(
        *(t.data_ptr() for t in (codes, scale, table, pages)),
        *(n, heads, slots, dim, dim // scale.shape[-1]),
        out.data_ptr(),
        torch.get_num_threads(),
    )


def decode_groups(
    kernels: CDLL, planes: Mapping[str, Tensor], names: tuple[str, str], bits: int, pages: Tensor, out: Tensor
) -> None:
    """KIVI's codes in plane ``names[0]``, with minimum and step of ``names[1]`` (``k`` or ``v``)."""
    n, heads, slots, dim = out.shape
    codes, low, step = (planes[name] for name in (names[0], f"{names[1]}_min", f"{names[1]}_step"))
    pointers = [t.data_ptr() for t in (codes, low, step, pages)]
    threads = torch.get_num_threads()
    if names[1] == "k":
        groups, size = codes.shape[2], codes.shape[3]
        kernels.decode_keys(bits, *pointers, n, heads * groups, size, dim, out.data_ptr(), threads)
    else:
        group = dim // low.shape[3]
        kernels.decode_values(bits, *pointers, n, heads, slots, dim, group, out.data_ptr(), threads)


@cache
def _ones(heads: int) -> Tensor:
    return torch.ones(heads, dtype=torch.float32)
