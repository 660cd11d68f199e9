"""A page store that keeps what it decoded: attention reads a mirror of all pages, as if nothing were coded.

It claims no saving: the mirror is as large as plain KV, lies beside the codes, and counts as workspace. It is
for looking at a format's effect on output at the speed of the plain cache. What attention sees is bit
for bit what :class:`PageStore` would decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from workbench.engine.open_pages import OpenPages
from workbench.engine.planes import zeros
from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.engine.store import PageStore, ReadPlan


class Mirror(OpenPages):
    """A row for every page of the pool, by its id: open pages, and what coded ones decode to."""

    def __init__(self, geometry: PageGeometry, specs: Sequence[PlaneSpec]) -> None:
        super().__init__(geometry, specs)
        self._hold({s.name: zeros(geometry, geometry.layers, geometry.pages + 1, s) for s in specs})

    def open(self, page: int) -> None:
        """A page's row is its own, and was zeroed when the page was allocated."""
        self._fresh.discard(page)
        self.rows.setdefault(page, page)

    @property
    def page_nbytes(self) -> int:
        """An open page has no bytes outside the mirror."""
        return 0

    def _give_back(self, row: int) -> None:
        """Rows are not given back: they are the page's own."""


class ResidentStore(PageStore):
    """The mirror's rows are page ids, so attention reads it in place; an open page lives there and nowhere
    else. Not for codecs that attention reads in place already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        none = torch.empty(0, dtype=torch.int64, device=self.geometry.device)
        self._all = ReadPlan(None, none, none)
        self._touched = none
        self._own: tuple[int, list[tuple[Tensor, Tensor]]] = (-1, [])

    def _open_pages(self, geometry: PageGeometry, specs: Sequence[PlaneSpec]) -> OpenPages:
        return Mirror(geometry, specs)

    def reset(self, pages: Sequence[int]) -> None:
        """Zero newly allocated pages, in the mirror too."""
        super().reset(pages)
        if pages:
            index = torch.tensor(pages, device=self.geometry.device)
            for plane in self._open.planes.values():
                plane.index_fill_(1, index, 0)

    def fill(self, pages: Sequence[int]) -> None:
        """Encode open pages that a commit filled, and mirror what came of them."""
        pages = [p for p in pages if self.is_open(p)]
        super().fill(pages)
        self._mirror(pages)

    def written(self, pages: Sequence[int]) -> None:
        """Coded bytes of these pages were put there from elsewhere: mirror them."""
        super().written(pages)
        self._mirror(pages)

    def copy(self, source: int, target: int, rows: int | None = None) -> None:
        """Copy-on-write, the mirror included."""
        super().copy(source, target, rows)
        for plane in self._open.planes.values():
            plane[:, target] = plane[:, source]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Move rows between slots; of a format coded by token, codes and mirror."""
        super().move(source, target)
        if self.codec.grain == "token":
            self._move_rows(self._open.specs, self._open.planes, source, target)

    def begin(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Note positions of the slots about to be written, and which pages they touch."""
        if self.codec.grain == "token":
            self._touched = torch.unique(slots // self.geometry.page_size)
            if len(self._touched) == 1:
                self._look_at(int(self._touched))
        return super().begin(slots, positions)

    def write(self, layer: int, where: Tensor, k: Tensor, v: Tensor) -> None:
        """Write rows of one layer; coded by token, they are read back at once."""
        super().write(layer, where, k, v)
        if self.codec.grain == "token":
            self._mirror_layer(layer, self._touched)

    def plan_read(self, pages: Sequence[int]) -> ReadPlan:
        """Attention uses the page ids themselves."""
        self._open.open_fresh(pages)
        return self._all

    def read(self, layer: int, plan: ReadPlan) -> tuple[Tensor, Tensor]:
        """The mirror of one layer, K and V [N, Hkv, P, D]."""
        planes = self._open.layers[layer]
        return planes["k"], planes["v"]

    def nbytes(self) -> dict[str, int]:
        """Bytes held; all of the mirror is ``workspace``."""
        out = super().nbytes()
        out["workspace"], out["kv_open"] = out["kv_open"], 0
        return out

    def _look_at(self, page: int) -> None:
        """Views of one page in every layer, kept while a sequence fills it."""
        if page != self._own[0]:
            part = slice(page, page + 1)
            self._own = page, [(t["k"][part], t["v"][part]) for t in self._open.layers]

    def _mirror(self, pages: Sequence[int]) -> None:
        if pages:
            where = torch.tensor(pages, device=self.geometry.device)
            for layer in range(self.geometry.layers):
                self._mirror_layer(layer, where)

    def _mirror_layer(self, layer: int, pages: Tensor) -> None:
        if pages is self._touched and len(pages) == 1:  # a decode step: straight into its place
            self._codecs[layer].decode(self._layers[layer], pages, *self._own[1][layer])
            return
        out = self._open.layers[layer]
        k, v = (t.new_empty(len(pages), *t.shape[1:]) for t in (out["k"], out["v"]))
        self._codecs[layer].decode(self._layers[layer], pages, k, v)
        out["k"].index_copy_(0, pages, k)
        out["v"].index_copy_(0, pages, v)


def mirror_nbytes(geometry: PageGeometry) -> int:
    """Bytes of the mirror of a KV group."""
    page = prod((2, geometry.kv_heads, geometry.page_size, geometry.head_dim)) * geometry.dtype.itemsize
    return geometry.layers * (geometry.pages + 1) * page
