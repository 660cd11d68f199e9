"""KVTC for pages at rest: a conversation at a time with its recent tokens in 16 bits, or page by page.

A page from the middle of a conversation has neither sinks nor a recent window: all of it is coded.
"""

from __future__ import annotations

from typing import Any

import torch

from workbench.engine.at_rest import Bytes
from workbench.kv.at_rest import StoredRows
from workbench.kv.cached import CachedRows
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.joint import JointRows
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
        return encoder.payload()

    def open(self, data: Bytes) -> StoredRows:
        """As :meth:`Kvtc.open`."""
        found: Any = self.codec.open(bytes(data) if isinstance(data, bytearray) else data)
        stored: StoredRows = found
        return stored
