"""KVTC for pages at rest: a conversation at a time with its recent tokens in 16 bits, or page by page.

A page from the middle of a conversation has neither sinks nor a recent window: all of it is coded. Payloads
stand one behind the other, each behind its length, and are decoded in one product.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from workbench.engine.at_rest import Bytes
from workbench.kv.at_rest import StoredRows
from workbench.kv.cached import CachedRows
from workbench.kv.frames import frame, frames
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.joint import JointRows
from workbench.kv.kvtc.stored import Stored
from workbench.models.config import ModelConfig
from workbench.models.progress import Cancel, Progress, check_cancel, report

SLICE = 256  # tokens between two looks at the cancel token


def joint_rows(config: ModelConfig) -> JointRows:
    """Joint rows of a model whose layers with a sliding window are stored elsewhere."""
    joint = JointRows(config)
    joint.window = None
    return joint


class KvtcRows:
    """A :class:`workbench.kv.at_rest.RowCodec` around a codec made with :func:`joint_rows`."""

    name = "kvtc"

    def __init__(self, codec: Kvtc) -> None:
        self.codec = codec

    @property
    def key(self) -> str:
        """The codec's."""
        return self.codec.key

    @property
    def nbytes(self) -> int:
        """Bytes of the artefact, and of the copies of its bases that were made so far."""
        sides = self.codec.artefact.k, self.codec.artefact.v
        return self.codec.shared_bytes + sum(side.copies for side in sides)

    def ready(self, cache: torch.dtype) -> KvtcRows:
        """Itself, with the copies of the bases made that are worked with where the cache is ``cache``."""
        for side in (self.codec.artefact.k, self.codec.artefact.v):
            _ = side.by_feature if cache == torch.bfloat16 else side.by_component
        return self

    def encode(
        self, rows: CachedRows, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> bytes:
        """Rows in slices of 256 tokens, which never shows in the bytes."""
        encoder = self.codec.encoder()
        for at in range(0, rows.tokens, SLICE):
            check_cancel(cancel, "Coding KV")
            cut = slice(at, at + SLICE)
            k, v = (tuple(x[cut] for x in side) for side in (rows.k, rows.v))
            encoder.push(CachedRows(k, v, rows.positions[cut]))
            report(progress, 0.9 * min((at + SLICE) / rows.tokens, 1.0), "coding rows")
        return frame(encoder.payload())

    def open(self, data: Bytes) -> StoredRows:
        """Raises :class:`PayloadError` as :meth:`Kvtc.open`, and for a false length."""
        parts = [self.codec.open(part) for part in frames(data)]
        return parts[0] if len(parts) == 1 else _Joined(parts)


class _Joined:
    """Payloads of consecutive rows: their coefficients in one product."""

    def __init__(self, parts: list[Stored]) -> None:
        self._parts = parts
        self.positions = torch.cat([p.positions for p in parts])

    @cached_property
    def _whole(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        """Coefficients of all parts, and the rotation to their positions."""
        factors = tuple(torch.cat(side) for side in zip(*(p.factors for p in self._parts), strict=True))
        turns = zip(*(p.turn for p in self._parts), strict=True)
        cos, sin = (torch.cat(part) for part in turns)
        return factors, (cos, sin)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All rows of a layer that sees all keys."""
        middle = self._parts[0].coded(layer, *self._whole)
        sizes = [p.header.coded for p in self._parts]
        pieces = zip(*(torch.split(x, sizes) for x in middle), strict=True)
        rows = [p.around(layer, k, v) for p, (k, v) in zip(self._parts, pieces, strict=True)]
        return torch.cat([k for k, _ in rows]), torch.cat([v for _, v in rows])
