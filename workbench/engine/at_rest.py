"""The seam of KV at rest: full pages of a sequence to bytes, and back into pages.

What rests is never read by attention. Bytes come from pages and go into pages, because a prefix index finds
pages only; the few tokens behind the last full page are computed again. Who restores pages publishes them
afterwards, so a codec that fails half-way leaves pages that nobody can find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.engine.pages import NULL_PAGE
from workbench.engine.store import PageStore
from workbench.models.config import KVGroup
from workbench.models.progress import Cancel, Progress
from workbench.spec.errors import InvariantError

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Coded:
    """Pages at rest: a JSON-able ``header`` and named byte streams."""

    header: Mapping[str, Any]
    streams: Mapping[str, Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of the streams."""
        return sum(len(s) for s in self.streams.values())


@dataclass(frozen=True)
class Pages:
    """Consecutive full pages of one sequence, the first row at absolute position ``first``.

    ``tables[g]`` are their ids in KV group g, equally many in each; the null page stands where a window has
    given a page back, in front only.
    """

    stores: Sequence[PageStore]
    groups: Sequence[KVGroup]
    tables: tuple[tuple[int, ...], ...]
    first: int = 0

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        return self.stores[0].geometry.page_size

    @property
    def tokens(self) -> int:
        """Rows of every layer."""
        return len(self.tables[0]) * self.page_size

    @property
    def positions(self) -> Tensor:
        """int64 [tokens], absolute."""
        return torch.arange(self.first, self.first + self.tokens)

    def present(self, group: int) -> list[int]:
        """Page ids of a group without those given back."""
        return [p for p in self.tables[group] if p != NULL_PAGE]

    def gone(self, group: int) -> int:
        """Leading pages of a group that were given back."""
        return len(self.tables[group]) - len(self.present(group))

    def home(self, layer: int) -> tuple[int, int]:
        """KV group and number within it of a model layer whose KV heads lie together.

        Raises :class:`InvariantError` for a layer whose heads are apart.
        """
        for g, group in enumerate(self.groups):
            if layer in group.layers and group.heads is None:
                return g, group.layers.index(layer)
        raise InvariantError(f"The KV heads of layer {layer} do not lie in one KV group.")

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, Hkv, D] of one layer of uncompressed KV; copies."""
        g, local = self.home(layer)
        where = self._index(g)
        k, v = (self.stores[g].planes[name][local].index_select(0, where) for name in ("k", "v"))
        return k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write rows [tokens, Hkv, D] of one layer, in any dtype, where :meth:`read` finds them."""
        g, local = self.home(layer)
        where = self._index(g)
        if len(k) != len(where) * self.page_size:
            raise InvariantError(f"{len(k)} rows do not fill {len(where)} pages of {self.page_size} slots.")
        for name, x in (("k", k), ("v", v)):
            plane = self.stores[g].planes[name][local]
            paged = x.to(plane).view(len(where), self.page_size, *x.shape[1:]).transpose(1, 2)
            plane.index_copy_(0, where, paged)

    def settle(self) -> None:
        """The pages hold what was restored: note the positions of their slots, and that they are coded."""
        for g, store in enumerate(self.stores):
            where, size = self._index(g), self.page_size
            first = self.first + self.gone(g) * size
            rows = torch.arange(first, first + len(where) * size, dtype=torch.int32, device=where.device)
            store.positions.view(-1, size)[where] = rows.view(-1, size)
            store.written(self.present(g))

    def _index(self, group: int) -> Tensor:
        return torch.tensor(self.present(group), dtype=torch.int64, device=self.stores[group].geometry.device)


class AtRest(Protocol):
    """How full pages become bytes at rest and pages again.

    ``lossy``: what comes back differs, so it may serve only who asked for it (its ``key`` is then part of the
    namespace); else every plane comes back bit for bit. ``nbytes`` are the constants held, of all layers.
    """

    name: str
    lossy: bool

    @property
    def key(self) -> str:
        """Names codec, version, options and calibration."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of constants it holds."""
        ...

    def encode(self, pages: Pages, progress: Progress | None = None, cancel: Cancel | None = None) -> Coded:
        """The pages as bytes; ``Cancelled`` between two layers."""
        ...

    def decode(
        self, coded: Coded, pages: Pages, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> None:
        """Write what was coded into fresh pages of the same shape.

        Raises :class:`PayloadError` for bytes that do not belong there, ``Cancelled`` between two layers; the
        pages then hold nothing of use.
        """
        ...


class ColdCodec(AtRest, Protocol):
    """A codec whose pages, coded one by one, can be decoded together."""

    def join(self, pages: Sequence[Coded]) -> Coded:
        """Consecutive pages as if they had been coded at once; at least one."""
        ...
