"""An opened chunk: decoded a layer at a time, so that early ones are used while later ones wait."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workbench.kv.cached import CachedRows
from workbench.kv.cachegen import ranges
from workbench.kv.cachegen.artefact import Artefact
from workbench.kv.cachegen.header import DTYPES, Header
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import Side
from workbench.kv.cachegen.quantize import decode_rows, from_parts, sizes
from workbench.kv.container import Payload
from workbench.spec.errors import PayloadError


class StoredChunk:
    """Rows of a checked payload; made by :meth:`workbench.kv.cachegen.codec.CacheGen.open`."""

    def __init__(self, payload: Payload, header: Header, artefact: Artefact, layout: Layout) -> None:
        self.header = header
        self._payload, self._artefact, self._layout = payload, artefact, layout
        self.positions = torch.arange(header.first, header.first + header.tokens)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated to their positions) and values [T, Hkv, D] of one layer.

        Rows that a sliding window no longer reaches are not stored; they are zero. Raises
        :class:`PayloadError` for a stream that does not decode.
        """
        return self._side("k", layer), self._side("v", layer)

    def rows(self) -> CachedRows:
        """All layers."""
        layers = [self.layer(i) for i in range(self._layout.layers)]
        return CachedRows(tuple(k for k, _ in layers), tuple(v for _, v in layers), self.positions)

    def _side(self, side: Side, layer: int) -> Tensor:
        header, layout = self.header, self._layout
        kept = layout.kept(layer, header.first, header.first + header.tokens, header.context)
        name = f"{side}.{layer}"
        data = self._payload.stream(name)
        if len(data) < 2 * kept:
            raise PayloadError(
                f"Stream {name!r} has {len(data):,} bytes; {2 * kept:,} of scales come first.",
                hint="Get it again.",
            )
        alphabet = header.level.alphabet(side, layer, layout.layers)
        scale = torch.from_numpy(np.frombuffer(data[: 2 * kept], np.int16).copy()).view(torch.float16)
        if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
            raise PayloadError(f"Stream {name!r} holds a scale that is no magnitude.", hint="Get it again.")
        parts = [(n, self._artefact.table(a, side, layer)) for a, n in sizes(alphabet, kept)]
        if kept:
            symbols = from_parts(alphabet, ranges.decode(data[2 * kept :], parts), scale)
            found = decode_rows(symbols, alphabet)
        else:
            found = torch.zeros(0, layout.channels, dtype=torch.float32)
        return place(found, header.tokens, layout, DTYPES[header.dtype])


def place(found: Tensor, tokens: int, layout: Layout, dtype: torch.dtype) -> Tensor:
    """[T, Hkv, D] whose last rows are ``found`` float32 [n, C]; earlier ones are zero."""
    out = torch.zeros(tokens, layout.heads, layout.dim, dtype=dtype)
    out[tokens - len(found) :] = found.view(-1, layout.heads, layout.dim).to(dtype)
    return out
