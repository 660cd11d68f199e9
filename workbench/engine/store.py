"""How one KV group sees the pages of its pool: planes made by a codec, written by slot, read by page.

A *page*-grain codec (KIVI) encodes a page once, when a commit has filled it. Until then the page
is *open*: it lives in full precision in a small pool of open pages, so that what a position sees
never depends on how its block was cut. A codec that attention cannot read in place is decoded,
one layer at a time, into a workspace that is counted and labelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.engine.open_pages import OpenPages
from workbench.engine.page_bytes import PageBytes
from workbench.engine.planes import group_planes, layer_numbers
from workbench.engine.seams import KVCodec, PageGeometry, PlaneSpec


@dataclass(frozen=True)
class ReadPlan:
    """Which pages a step reads: ids attention will use for each page, and how to produce them."""

    compact: dict[int, int] | None  # page id -> row of the workspace; None: attention reads the pool in place
    coded: Tensor  # int64 page ids decoded by the codec, rows 0 .. len-1
    open: Tensor  # int64 rows of the open pool, the rows after them


class PageStore:
    """One KV group on the storages of its pool (``held``); layer numbers are local to the group.

    ``layers`` are the model's numbers of the group's layers, for codecs with constants per layer (by default
    the group is the whole model); layers of a drafter follow them. ``bounded``: attention chooses pages by
    the bounds of their keys. Without ``held`` the group has a pool of its own; groups that share one need
    formats whose pages are laid out alike, and no more layers than it has.
    """

    def __init__(
        self,
        codec: KVCodec,
        open_codec: KVCodec,
        geometry: PageGeometry,
        layers: Sequence[int] | None = None,
        *,
        bounded: bool = False,
        held: PageBytes | None = None,
    ) -> None:
        self.codec = codec
        self.geometry = geometry
        numbers = layer_numbers(geometry, layers)
        self._codecs = [codec.at(n) for n in numbers]
        made = group_planes(codec, geometry, numbers)
        rows = {name: len(owners) for name, owners in made.owners.items()}
        self.specs = tuple(made.specs.values())
        if held is None:
            opened = self._open_pages(geometry, open_codec.planes(geometry))
            held = PageBytes(geometry, self.specs, rows, opened)
        self.held = held
        self.planes = held.of(self.specs, rows)
        self.positions = held.positions
        self._layers = [{n: self.planes[n][row] for n, row in layer.items()} for layer in made.rows]
        self._open_codec = open_codec
        self._open = held.open
        self.bounds = held.bounded() if bounded else None

    def _open_pages(self, geometry: PageGeometry, specs: Sequence[PlaneSpec]) -> OpenPages:
        return OpenPages(geometry, specs)

    # -- page life ------------------------------------------------------------------------------

    def reset(self, pages: Sequence[int]) -> None:
        """Zero newly allocated pages, so that nothing of a former owner can be seen."""
        if not pages:
            return
        index = torch.tensor(pages, device=self.geometry.device)
        for plane in self.planes.values():
            _bytes_of(plane).index_fill_(1, index, 0)
        self.positions.view(-1, self.geometry.page_size)[index] = -1
        if self.bounds is not None:
            self.bounds.forget(pages)
        if self.codec.grain == "page":
            self._open.expect(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Pages without a reference keep their coded bytes; open ones give their row back."""
        self._open.release(pages)

    def fill(self, pages: Sequence[int]) -> None:
        """A commit filled these pages: encode the open ones."""
        rows_of = self._open.rows
        pages = [p for p in pages if p in rows_of]
        if not pages:
            return
        where = torch.tensor(pages, device=self.geometry.device)
        rows = torch.tensor([rows_of[p] for p in pages], device=self.geometry.device)
        own = self._open.layers[: self.geometry.layers]
        for codec, planes, hot in zip(self._codecs, self._layers, own, strict=True):
            codec.encode(planes, where, hot["k"][rows], hot["v"][rows])
        self.release(pages)

    def written(self, pages: Sequence[int]) -> None:
        """Coded bytes of these pages were put into the planes from elsewhere (restored, compacted)."""
        self.release(pages)

    @property
    def copies_rows(self) -> bool:
        """Whether the head of a page means something without its tail: not where pages are coded whole."""
        return self.codec.grain == "token"

    def copy(self, source: int, target: int, rows: int | None = None) -> None:
        """Copy-on-write: give ``target`` the content of ``source``, open or coded.

        With ``rows`` only the first so many are valid in ``target``; needs :attr:`copies_rows`.
        """
        if self._open.fresh(source):
            self.reset([target])
        elif source in self._open.rows:
            self._open.copy(source, target)
        else:
            for plane in self.planes.values():
                raw = _bytes_of(plane)
                raw[:, target] = raw[:, source]
            self.release([target])  # what it holds now is coded
        table = self.positions.view(-1, self.geometry.page_size)
        table[target] = table[source]
        if rows is not None:
            table[target, rows:] = -1

    def move(self, source: Tensor, target: Tensor) -> None:
        """Move rows between slots (int64 [n] each) in every layer; used to compact an accepted tree path."""
        self.positions[target] = self.positions[source]
        if self.codec.grain == "page":
            source, target = self._open.slots(source), self._open.slots(target)
            self._move_rows(self._open.specs, self._open.planes, source, target)
        else:
            self._move_rows(self.specs, self.planes, source, target)

    def _move_rows(
        self, specs: Sequence[PlaneSpec], planes: dict[str, Tensor], source: Tensor, target: Tensor
    ) -> None:
        size = self.geometry.page_size
        for spec in specs:
            plane = planes[spec.name]
            axis = 2 + spec.axes.index("slot")
            by_slot = _bytes_of(plane).movedim(axis, 2)  # [L, N, P, ...]
            by_slot[:, target // size, target % size] = by_slot[:, source // size, source % size]

    # -- a step -----------------------------------------------------------------------------------

    def begin(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Note absolute positions of the slots (int64 [T]) about to be written; returns where to write."""
        self.positions[slots] = positions.to(torch.int32)
        return self._open.slots(slots) if self.codec.grain == "page" else slots

    def write(self, layer: int, where: Tensor, k: Tensor, v: Tensor) -> None:
        """Write rows [T, Hkv, D] of one layer at what :meth:`begin` returned."""
        if self.codec.grain == "page":
            self._open_codec.encode(self._open.layers[layer], where, k, v)
        else:
            self._codecs[layer].encode(self._layers[layer], where, k, v)

    def plan_read(self, pages: Sequence[int]) -> ReadPlan:
        """How the given pages (unique ids) will be read in this step."""
        device = self.geometry.device
        if self.codec.in_place:
            none = torch.empty(0, dtype=torch.int64, device=device)
            return ReadPlan(None, none, none)
        self._open.open_fresh(pages)
        rows_of = self._open.rows
        coded = [p for p in pages if p not in rows_of]
        hot = [p for p in pages if p in rows_of]
        compact = {p: i for i, p in enumerate([*coded, *hot])}
        rows = [rows_of[p] for p in hot]
        return ReadPlan(
            compact,
            torch.tensor(coded, dtype=torch.int64, device=device),
            torch.tensor(rows, dtype=torch.int64, device=device),
        )

    def read(self, layer: int, plan: ReadPlan) -> tuple[Tensor, Tensor]:
        """K and V [N, Hkv, P, D] of one layer: the pool, or the workspace (valid until the next read)."""
        planes = self._layers[layer]
        if plan.compact is None:
            return planes["k"], planes["v"]
        n_coded, n = len(plan.coded), len(plan.compact)
        k, v = self.held.workspace(n)
        if n_coded:
            self._codecs[layer].decode(planes, plan.coded, k[:n_coded], v[:n_coded])
        if n > n_coded:
            hot = self._open.layers[layer]
            torch.index_select(hot["k"], 0, plan.open, out=k[n_coded:n])
            torch.index_select(hot["v"], 0, plan.open, out=v[n_coded:n])
        return k[:n], v[:n]

    # -- bytes ------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        """Bytes of the storages of its pool: ``kv_payload``, ``kv_meta``, ``kv_open`` and ``workspace``."""
        return self.held.nbytes()

    def is_open(self, page: int) -> bool:
        """True while a page is kept in full precision and not yet encoded."""
        return page in self._open.rows

    @property
    def open_page_nbytes(self) -> int:
        """Bytes of one open page, all layers."""
        return self._open.page_nbytes


def _bytes_of(plane: Tensor) -> Tensor:
    """The plane as integers where torch cannot index its dtype (fp8)."""
    return plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane
