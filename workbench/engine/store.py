"""The bytes of one KV group: planes made by a codec, written by slot, read by page.

A *page*-grain codec (KIVI) encodes a page once, when a commit has filled it. Until then the page
is *open*: it lives in full precision in a small pool of open pages, so that what a position sees
never depends on how its block was cut. A codec that attention cannot read in place is decoded,
one layer at a time, into a workspace that is counted and labelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from workbench.engine.bounds import PageBounds
from workbench.engine.planes import group_planes, layer_numbers
from workbench.engine.seams import KVCodec, PageGeometry, PlaneSpec
from workbench.spec.errors import InvariantError, OptionError


@dataclass(frozen=True)
class ReadPlan:
    """Which pages a step reads: ids attention will use for each page, and how to produce them."""

    compact: dict[int, int] | None  # page id -> row of the workspace; None: attention reads the pool in place
    coded: Tensor  # int64 page ids decoded by the codec, rows 0 .. len-1
    open: Tensor  # int64 rows of the open pool, the rows after them


class PageStore:
    """Owns the planes of one KV group; layer numbers are local to the group.

    ``layers`` are the model's numbers of the group's layers, for codecs with constants per layer (by default
    the group is the whole model); layers of a drafter follow them. ``bounded``: attention chooses pages by
    the bounds of their keys.
    """

    def __init__(
        self,
        codec: KVCodec,
        open_codec: KVCodec,
        geometry: PageGeometry,
        layers: Sequence[int] | None = None,
        *,
        bounded: bool = False,
    ) -> None:
        self.codec = codec
        self.geometry = geometry
        numbers = layer_numbers(geometry, layers)
        self._codecs = [codec.at(n) for n in numbers]
        made = group_planes(codec, geometry, numbers)
        self.specs = tuple(made.specs.values())
        rows = geometry.pages + 1  # page 0 is the null page
        self.planes = {s.name: zeros(geometry, len(made.owners[s.name]), rows, s) for s in self.specs}
        self.positions = torch.full(
            (rows * geometry.page_size,), -1, dtype=torch.int32, device=geometry.device
        )
        self._layers = [{n: self.planes[n][row] for n, row in layer.items()} for layer in made.rows]
        self._open_codec = open_codec
        self._fresh: set[int] = set()  # allocated and not written yet: they need no open row before that
        self._open_of: dict[int, int] = {}
        self._open_free: list[int] = []
        self._open: dict[str, Tensor] = {}
        self._open_layers: list[dict[str, Tensor]] = []
        self._work: tuple[Tensor, Tensor] | None = None
        self.bounds = PageBounds(geometry) if bounded else None

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
            self.release(pages)
            self._fresh.update(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Pages without a reference keep their coded bytes; open ones give their row back."""
        self._fresh.difference_update(pages)
        for page in pages:
            row = self._open_of.pop(page, None)
            if row is not None:
                self._open_free.append(row)

    def fill(self, pages: Sequence[int]) -> None:
        """A commit filled these pages: encode the open ones."""
        pages = [p for p in pages if p in self._open_of]
        if not pages:
            return
        where = torch.tensor(pages, device=self.geometry.device)
        rows = torch.tensor([self._open_of[p] for p in pages], device=self.geometry.device)
        for codec, planes, hot in zip(self._codecs, self._layers, self._open_layers, strict=True):
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
        if source in self._fresh:
            self.reset([target])
        elif source in self._open_of:
            self._open_page(target)
            a, b = self._open_of[source], self._open_of[target]
            for plane in self._open.values():
                plane[:, b] = plane[:, a]
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
            source, target = self._open_slots(source), self._open_slots(target)
            self._move_rows(self._open_codec.planes(self.geometry), self._open, source, target)
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
        return self._open_slots(slots) if self.codec.grain == "page" else slots

    def write(self, layer: int, where: Tensor, k: Tensor, v: Tensor) -> None:
        """Write rows [T, Hkv, D] of one layer at what :meth:`begin` returned."""
        if self.codec.grain == "page":
            self._open_codec.encode(self._open_layers[layer], where, k, v)
        else:
            self._codecs[layer].encode(self._layers[layer], where, k, v)

    def plan_read(self, pages: Sequence[int]) -> ReadPlan:
        """How the given pages (unique ids) will be read in this step."""
        device = self.geometry.device
        if self.codec.in_place:
            none = torch.empty(0, dtype=torch.int64, device=device)
            return ReadPlan(None, none, none)
        self._open_fresh(pages)  # this step writes them, and reads what it wrote
        coded = [p for p in pages if p not in self._open_of]
        hot = [p for p in pages if p in self._open_of]
        compact = {p: i for i, p in enumerate([*coded, *hot])}
        rows = [self._open_of[p] for p in hot]
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
        k, v = self._workspace(n)
        if n_coded:
            self._codecs[layer].decode(planes, plan.coded, k[:n_coded], v[:n_coded])
        if n > n_coded:
            hot = self._open_layers[layer]
            torch.index_select(hot["k"], 0, plan.open, out=k[n_coded:n])
            torch.index_select(hot["v"], 0, plan.open, out=v[n_coded:n])
        return k[:n], v[:n]

    # -- bytes ------------------------------------------------------------------------------------

    def nbytes(self) -> dict[str, int]:
        """Bytes of the storages held: ``kv_payload``, ``kv_meta``, ``kv_open`` and ``workspace``."""
        out = {"kv_payload": 0, "kv_meta": 0, "kv_open": 0, "workspace": 0}
        for spec in self.specs:
            out[spec.category] += self.planes[spec.name].untyped_storage().nbytes()
        out["kv_meta"] += self.positions.untyped_storage().nbytes()
        out["kv_meta"] += self.bounds.nbytes if self.bounds is not None else 0
        out["kv_open"] = sum(t.untyped_storage().nbytes() for t in self._open.values())
        if self._work is not None:
            out["workspace"] = sum(t.untyped_storage().nbytes() for t in self._work)
        return out

    def is_open(self, page: int) -> bool:
        """True while a page is kept in full precision and not yet encoded."""
        return page in self._open_of

    @property
    def open_page_nbytes(self) -> int:
        """Bytes of one open page, all layers."""
        return sum(t[:, 0].numel() * t.element_size() for t in self._open.values())

    # -- inside -------------------------------------------------------------------------------------

    def _open_fresh(self, pages: Sequence[int]) -> None:
        for page in sorted(self._fresh.intersection(pages)):
            self._open_page(page)

    def _open_page(self, page: int) -> None:
        if page in self._open_of:
            return
        if not self._open_free:
            self._grow_open()
        row = self._open_free.pop()
        self._fresh.discard(page)
        self._open_of[page] = row
        for plane in self._open.values():
            plane[:, row] = 0

    def _grow_open(self) -> None:
        have = next(iter(self._open.values())).shape[1] if self._open else 0
        rows = max(1, 2 * have)
        grown = {}
        for spec in self._open_codec.planes(self.geometry):
            plane = zeros(self.geometry, self.geometry.layers, rows, spec)
            if have:
                plane[:, :have] = self._open[spec.name]
            grown[spec.name] = plane
        self._open = grown
        self._open_layers = [{n: t[i] for n, t in grown.items()} for i in range(self.geometry.layers)]
        self._open_free.extend(range(have, rows))

    def _open_slots(self, slots: Tensor) -> Tensor:
        size = self.geometry.page_size
        pages = (slots // size).tolist()
        self._open_fresh(pages)
        try:
            rows = [self._open_of[p] for p in pages]
        except KeyError as err:
            raise InvariantError(f"page {err.args[0]} is written after it was encoded.") from None
        return torch.tensor(rows, dtype=torch.int64, device=slots.device) * size + slots % size

    def _workspace(self, n: int) -> tuple[Tensor, Tensor]:
        if self._work is None or self._work[0].shape[0] < n:
            g = self.geometry
            rows = n + n // 4 + 1
            shape = (rows, g.kv_heads, g.page_size, g.head_dim)
            self._work = (
                torch.zeros(shape, dtype=g.dtype, device=g.device),
                torch.zeros(shape, dtype=g.dtype, device=g.device),
            )
        return self._work


def pool_nbytes(codec: KVCodec, geometry: PageGeometry, *, bounded: bool = False) -> int:
    """Bytes that a :class:`PageStore` allocates when it is made; at most, of formats that differ by layer."""
    page = sum(prod(s.shape) * s.dtype.itemsize for s in codec.planes(geometry)) * geometry.layers
    if bounded:
        page += 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * geometry.dtype.itemsize
    return (geometry.pages + 1) * (page + geometry.page_size * torch.int32.itemsize)


def zeros(geometry: PageGeometry, layers: int, rows: int, spec: PlaneSpec) -> Tensor:
    """A plane [layers, rows, *shape]; raises :class:`OptionError` when the device refuses the memory."""
    whole = (layers, rows, *spec.shape)
    try:
        return torch.zeros(whole, dtype=spec.dtype, device=geometry.device)
    except RuntimeError:  # torch's only word for memory that the machine refuses
        gib = prod(whole) * spec.dtype.itemsize / 2**30
        raise OptionError(
            f"A part of the KV pool needs {gib:,.1f} GiB on {geometry.device}, which cannot be had.",
            hint="Lower kv_pool_tokens, or choose a smaller KV format.",
        ) from None


def _bytes_of(plane: Tensor) -> Tensor:
    """The plane as integers where torch cannot index its dtype (fp8)."""
    return plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane
