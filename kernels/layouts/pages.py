"""What a page of a KV format consists of: planes, their shapes, strides and bytes.

A cache of one layer is one tensor per plane, ``[pages, *plane.shape]``, contiguous. Planes are head-major
(``[kv_head, token, dim]`` and the like), so that one head of one page is one contiguous block: a tile that
TMA fetches whole. The engine's page pool allocates exactly these shapes for its plain, INT8 and KIVI formats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import prod

import torch
from torch import Tensor

from workbench.spec.errors import UnsupportedInput


@dataclass(frozen=True)
class Plane:
    """One tensor of a format: ``shape`` per page and the meaning of its ``axes``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one page of this plane."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PageLayout:
    """One KV format at a page size: ``page`` tokens, ``heads`` KV heads, head size ``dim``.

    ``block`` is the number of tokens that are encoded together: 1 when each token stands alone, the page
    when the format encodes full pages only.
    """

    format: str
    page: int
    heads: int
    dim: int
    planes: tuple[Plane, ...]
    block: int = 1

    def plane(self, name: str) -> Plane:
        """The plane of that name; raises ``UnsupportedInput`` when the format has none."""
        for plane in self.planes:
            if plane.name == name:
                return plane
        raise UnsupportedInput(
            f"The KV format {self.format} has no plane {name!r}.",
            hint=f"Its planes: {', '.join(p.name for p in self.planes)}.",
        )

    def allocate(self, pages: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """Zeroed planes for ``pages`` pages of one layer."""
        return {
            p.name: torch.zeros((pages, *p.shape), dtype=torch.uint8, device=device).to(p.dtype)
            for p in self.planes
        }

    def strides(self, name: str) -> tuple[int, ...]:
        """Strides in elements of ``[pages, *shape]``, the page's first."""
        shape = self.plane(name).shape
        return tuple(prod(shape[i:]) for i in range(len(shape) + 1))

    def bytes_per_token(self) -> Fraction:
        """Bytes of one token of one layer, K and V with their scales."""
        return Fraction(sum(p.nbytes for p in self.planes), self.page)

    def check(self, planes: Mapping[str, Tensor]) -> int:
        """Number of pages of ``planes``; raises ``UnsupportedInput`` for what does not fit the layout."""
        counts = set()
        for plane in self.planes:
            found = planes.get(plane.name)
            if found is None or found.dtype != plane.dtype or tuple(found.shape[1:]) != plane.shape:
                have = "nothing" if found is None else f"{found.dtype} {tuple(found.shape)}"
                raise UnsupportedInput(
                    f"Plane {plane.name!r} of {self.format} pages must be {plane.dtype} "
                    f"[pages, {', '.join(map(str, plane.shape))}], not {have}.",
                    hint="Allocate the planes with the layout's allocate().",
                )
            if not found.is_contiguous():
                raise UnsupportedInput(
                    f"Plane {plane.name!r} of {self.format} pages must be contiguous.",
                    hint="Kernels address pages by their number: pass the whole plane, not a view.",
                )
            counts.add(found.shape[0])
        if len(counts) != 1:
            raise UnsupportedInput(
                f"The planes of {self.format} hold different numbers of pages: {sorted(counts)}.",
                hint="Allocate the planes with the layout's allocate().",
            )
        return int(counts.pop())


def require_multiple(what: str, value: int, of: int, format: str) -> None:
    """Raise ``UnsupportedInput`` unless ``value`` is a positive multiple of ``of``."""
    if value < 1 or value % of:
        raise UnsupportedInput(
            f"{format} pages need a {what} that is a multiple of {of}, not {value}.",
            hint="Choose another page size, group or KV format.",
        )


def scatter(plane: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write ``rows`` [T, H, ...] to slots ``page * P + offset`` (int64 [T]) of a plane [N, H, P, ...]."""
    size = plane.shape[2]
    kind = _bits(plane)
    plane.view(kind)[slots // size, :, slots % size] = rows.contiguous().view(kind)


def _bits(x: Tensor) -> torch.dtype:
    """An integer dtype of the same width: indexing is not implemented for the 8-bit float types."""
    return torch.uint8 if x.dtype.itemsize == 1 else x.dtype
