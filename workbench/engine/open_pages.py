"""Pages of a pool that are still in full precision: a format that codes whole pages has not coded them yet.

A page is *fresh* from its allocation to its first write: only then does it need a row here. Rows are few, one
or two per sequence, and grow by doubling. Groups that share a pool share them, as a page is one group's at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.engine.planes import zeros
from workbench.engine.seams import PageGeometry, PlaneSpec
from workbench.spec.errors import InvariantError


class OpenPages:
    """``planes`` [layers, rows, *shape] of ``specs``; ``rows`` says which row a page has."""

    def __init__(self, geometry: PageGeometry, specs: Sequence[PlaneSpec]) -> None:
        self.geometry = geometry
        self.specs = tuple(specs)
        self.planes: dict[str, Tensor] = {}
        self.layers: list[dict[str, Tensor]] = []
        self.rows: dict[int, int] = {}
        self._fresh: set[int] = set()
        self._free: list[int] = []

    def expect(self, pages: Sequence[int]) -> None:
        """These pages were allocated: they will be written."""
        self.release(pages)
        self._fresh.update(pages)

    def fresh(self, page: int) -> bool:
        """Whether a page was allocated and not written yet."""
        return page in self._fresh

    def open(self, page: int) -> None:
        """Give a page a zeroed row, unless it has one."""
        if page in self.rows:
            return
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._fresh.discard(page)
        self.rows[page] = row
        for plane in self.planes.values():
            plane[:, row] = 0

    def open_fresh(self, pages: Sequence[int]) -> None:
        """Give the fresh ones of these pages a row: a step writes them, and reads what it wrote."""
        for page in sorted(self._fresh.intersection(pages)):
            self.open(page)

    def release(self, pages: Sequence[int]) -> None:
        """These pages were coded, or nobody holds them any more: their rows are free."""
        self._fresh.difference_update(pages)
        for page in pages:
            row = self.rows.pop(page, None)
            if row is not None:
                self._give_back(row)

    def copy(self, source: int, target: int) -> None:
        """Give ``target`` a row with what the open page ``source`` holds."""
        self.open(target)
        a, b = self.rows[source], self.rows[target]
        for plane in self.planes.values():
            plane[:, b] = plane[:, a]

    def slots(self, slots: Tensor) -> Tensor:
        """Where slots (int64 [T]) of the pool lie in the rows.

        Raises :class:`InvariantError` for a page that was coded already.
        """
        size = self.geometry.page_size
        pages = (slots // size).tolist()
        self.open_fresh(pages)
        try:
            rows = [self.rows[p] for p in pages]
        except KeyError as err:
            raise InvariantError(f"page {err.args[0]} is written after it was encoded.") from None
        return torch.tensor(rows, dtype=torch.int64, device=slots.device) * size + slots % size

    @property
    def nbytes(self) -> int:
        """Bytes of the storages held."""
        return sum(t.untyped_storage().nbytes() for t in self.planes.values())

    @property
    def page_nbytes(self) -> int:
        """Bytes of one row, all layers."""
        return sum(t[:, 0].numel() * t.element_size() for t in self.planes.values())

    def _give_back(self, row: int) -> None:
        self._free.append(row)

    def _grow(self) -> None:
        have = next(iter(self.planes.values())).shape[1] if self.planes else 0
        rows = max(1, 2 * have)
        grown = {}
        for spec in self.specs:
            plane = zeros(self.geometry, self.geometry.layers, rows, spec)
            if have:
                plane[:, :have] = self.planes[spec.name]
            grown[spec.name] = plane
        self._hold(grown)
        self._free.extend(range(have, rows))

    def _hold(self, planes: dict[str, Tensor]) -> None:
        self.planes = planes
        self.layers = [{n: t[i] for n, t in planes.items()} for i in range(self.geometry.layers)]
