"""The storages behind one page pool: planes, positions, open pages, bounds, and the workspace of one layer.

KV groups whose pages are of one size share them: a page is ``layers`` rows of every plane, of whichever group
it belongs to. A group of fewer layers leaves the rest of its pages empty. Everything here is held once,
however many groups look at it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from workbench.engine.bounds import PageBounds
from workbench.engine.open_pages import OpenPages
from workbench.engine.planes import zeros
from workbench.engine.seams import KVCodec, PageGeometry, PlaneSpec
from workbench.spec.errors import InvariantError


class PageBytes:
    """Zeroed planes [rows, pages + 1, *shape], ``rows`` by name; page 0 is the null page.

    ``geometry`` is that of the largest group. Raises :class:`OptionError` when the memory cannot be had.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        specs: Sequence[PlaneSpec],
        rows: Mapping[str, int],
        opened: OpenPages,
    ) -> None:
        self.geometry = geometry
        self.specs = tuple(specs)
        self.open = opened
        self.planes = {s.name: zeros(geometry, rows[s.name], geometry.pages + 1, s) for s in specs}
        slots = (geometry.pages + 1) * geometry.page_size
        self.positions = torch.full((slots,), -1, dtype=torch.int32, device=geometry.device)
        self.bounds: PageBounds | None = None
        self.work: tuple[Tensor, Tensor] | None = None

    def of(self, specs: Sequence[PlaneSpec], rows: Mapping[str, int]) -> dict[str, Tensor]:
        """The planes of a group that uses the first ``rows`` rows of each.

        Raises :class:`InvariantError` for a group whose pages are laid out otherwise.
        """
        mine = {s.name: (s.dtype, s.shape, s.category) for s in self.specs}
        if {s.name: (s.dtype, s.shape, s.category) for s in specs} != mine:
            raise InvariantError("KV groups whose pages are laid out differently cannot share a pool.")
        if any(rows[name] > len(plane) for name, plane in self.planes.items()):
            raise InvariantError("A KV group has more layers than the pages of its pool.")
        return {n: p if rows[n] == len(p) else p[: rows[n]] for n, p in self.planes.items()}

    def bounded(self) -> PageBounds:
        """The bounds of the keys of its pages, made when first asked for."""
        if self.bounds is None:
            self.bounds = PageBounds(self.geometry)
        return self.bounds

    def workspace(self, n: int) -> tuple[Tensor, Tensor]:
        """Room for the decoded K and V of ``n`` pages of one layer; what it held before is void."""
        if self.work is None or self.work[0].shape[0] < n:
            g = self.geometry
            shape = (n + n // 4 + 1, g.kv_heads, g.page_size, g.head_dim)
            self.work = (
                torch.zeros(shape, dtype=g.dtype, device=g.device),
                torch.zeros(shape, dtype=g.dtype, device=g.device),
            )
        return self.work

    def nbytes(self) -> dict[str, int]:
        """Bytes of the storages held: ``kv_payload``, ``kv_meta``, ``kv_open`` and ``workspace``."""
        out = {"kv_payload": 0, "kv_meta": 0, "kv_open": self.open.nbytes, "workspace": 0}
        for spec in self.specs:
            out[spec.category] += self.planes[spec.name].untyped_storage().nbytes()
        out["kv_meta"] += self.positions.untyped_storage().nbytes()
        out["kv_meta"] += self.bounds.nbytes if self.bounds is not None else 0
        if self.work is not None:
            out["workspace"] = sum(t.untyped_storage().nbytes() for t in self.work)
        return out


def pool_nbytes(codec: KVCodec, geometry: PageGeometry, *, bounded: bool = False) -> int:
    """Bytes of a pool's planes, positions and bounds; at most, of formats that differ by layer."""
    page = sum(prod(s.shape) * s.dtype.itemsize for s in codec.planes(geometry)) * geometry.layers
    if bounded:
        page += 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * geometry.dtype.itemsize
    return (geometry.pages + 1) * (page + geometry.page_size * torch.int32.itemsize)
