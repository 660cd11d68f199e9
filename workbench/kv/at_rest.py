"""Pages at rest through a codec for rows: KVTC, CacheGen, and whatever comes next.

The codec is given the rows of the layers that see all keys. Layers of a sliding window hold a bounded number
of pages and forget the rest, so their pages stay as they are, whole: a later prompt may end anywhere inside
the first page that the window still sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workbench.engine.at_rest import Bytes, Coded, Pages
from workbench.kv.cached import CachedRows
from workbench.kv.raw import plane_bytes, put_planes
from workbench.models.progress import Cancel, Progress, check_cancel, part, report
from workbench.spec.errors import PayloadError, UnsupportedInput


class StoredRows(Protocol):
    """Opened bytes: layers are decoded one by one."""

    positions: Tensor

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated to their positions) and values [T, Hkv, D] of a layer that sees all keys."""
        ...


class RowCodec(Protocol):
    """Rows to bytes and back, with losses; the bytes of consecutive rows, one after the other, are theirs."""

    name: str

    @property
    def key(self) -> str:
        """Names codec, version, options and calibration."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of constants it holds."""
        ...

    def encode(
        self, rows: CachedRows, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> bytes:
        """Rows at consecutive positions, of every layer; those of layers with a window are all zero.

        Raises :class:`UnsupportedInput` for rows it cannot hold, and ``Cancelled``.
        """
        ...

    def open(self, data: Bytes) -> StoredRows:
        """Raises :class:`PayloadError` for bytes that are damaged, or of another model or calibration."""
        ...


class CodedPages:
    """The :class:`workbench.engine.at_rest.AtRest` of a codec for rows; its KV format is uncompressed."""

    lossy = True

    def __init__(self, codec: RowCodec) -> None:
        self.codec = codec
        self.name = codec.name

    @property
    def key(self) -> str:
        """The codec's."""
        return self.codec.key

    @property
    def nbytes(self) -> int:
        """The codec's."""
        return self.codec.nbytes

    def encode(self, pages: Pages, progress: Progress | None = None, cancel: Cancel | None = None) -> Coded:
        """Stream ``rows`` of the codec, and the planes of windowed groups.

        Raises :class:`UnsupportedInput` for a KV format whose planes are not rows.
        """
        data = self.codec.encode(_rows(pages, cancel), part(progress, 0.0, 0.9), cancel)
        kept = plane_bytes(pages, _windowed(pages), part(progress, 0.9, 1.0), cancel)
        return Coded(kept.header, {"rows": data, **kept.streams})

    def decode(
        self, coded: Coded, pages: Pages, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> None:
        """Layer by layer; raises :class:`PayloadError` for rows of other positions."""
        data = coded.streams.get("rows")
        if data is None:
            raise PayloadError("The stored pages have no rows.", hint="Save them again.")
        stored = self.codec.open(data)
        if not torch.equal(stored.positions, pages.positions):
            raise PayloadError(
                f"The stored rows are not those of positions {pages.first} to {pages.first + pages.tokens}.",
                hint="Save them again.",
            )
        put_planes(coded, pages, _windowed(pages))
        layers = [layer for g in _full(pages) for layer in pages.groups[g].layers]
        for i, layer in enumerate(sorted(layers)):
            check_cancel(cancel, "Decoding stored KV")
            pages.write(layer, *stored.layer(layer))
            report(progress, (i + 1) / len(layers), f"decoding layer {layer + 1}")

    def join(self, pages: Sequence[Coded]) -> Coded:
        """The rows one after the other; for pages of models without windowed layers."""
        return Coded(
            pages[0].header, {"rows": b"".join(p.streams["rows"] for p in pages if "rows" in p.streams)}
        )


def _full(pages: Pages) -> list[int]:
    return [g for g, group in enumerate(pages.groups) if group.window is None]


def _windowed(pages: Pages) -> list[int]:
    return [g for g, group in enumerate(pages.groups) if group.window is not None]


def _rows(pages: Pages, cancel: Cancel | None) -> CachedRows:
    for store in pages.stores:
        if not store.codec.in_place or store.geometry.dtype != store.planes["k"].dtype:
            raise UnsupportedInput(
                f"Rows are coded from uncompressed KV, and these pages are in {store.codec.key}.",
                hint="Save them as raw, or switch the KV format off.",
            )
    geometry = pages.stores[0].geometry
    nothing = torch.zeros(1, 1, 1, dtype=geometry.dtype)
    empty = nothing.expand(pages.tokens, geometry.kv_heads, geometry.head_dim)
    k: dict[int, Tensor] = {}
    v: dict[int, Tensor] = {}
    for group in pages.groups:
        for layer in group.layers:
            check_cancel(cancel, "Reading cached rows")
            k[layer], v[layer] = pages.read(layer) if group.window is None else (empty, empty)
    return CachedRows(tuple(k[i] for i in sorted(k)), tuple(v[i] for i in sorted(v)), pages.positions)
