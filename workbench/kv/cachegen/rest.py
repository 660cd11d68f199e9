"""CacheGen for pages at rest: chunks of 160 tokens at one level, one after the other in one stream."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.engine.at_rest import Bytes
from workbench.kv.at_rest import StoredRows
from workbench.kv.cached import CachedRows
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.context import CHUNK, encode_context
from workbench.kv.cachegen.layout import Layout
from workbench.kv.cachegen.levels import Level
from workbench.kv.cachegen.stored import StoredChunk
from workbench.kv.frames import frame, frames
from workbench.models.config import ModelConfig
from workbench.models.progress import Cancel, Progress


def full_layout(config: ModelConfig) -> Layout:
    """The layout of a model whose layers with a sliding window are stored elsewhere."""
    layout = Layout(config)
    layout.windows = tuple(None if w is None else 0 for w in layout.windows)
    return layout


class CacheGenRows:
    """A :class:`workbench.kv.at_rest.RowCodec` around a codec made with :func:`full_layout`."""

    name = "cachegen"

    def __init__(self, codec: CacheGen, level: Level, chunk: int = CHUNK) -> None:
        self.codec, self.level, self.chunk = codec, level, chunk

    @property
    def key(self) -> str:
        """The codec's at its level, and how contexts are cut."""
        return f"{self.codec.key(self.level)}/{self.chunk}"

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that the level needs."""
        return self.codec.artefact.nbytes(self.level)

    def encode(
        self, rows: CachedRows, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> bytes:
        """Each chunk behind its length."""
        chunks = encode_context(
            self.codec, rows, [self.level], chunk=self.chunk, progress=progress, cancel=cancel
        )
        return b"".join(frame(data) for (data,) in chunks)

    def open(self, data: Bytes) -> StoredRows:
        """Check every chunk; raises :class:`PayloadError` for what is wrong with one, or its length."""
        return _Joined([self.codec.open(part) for part in frames(data)])


class _Joined:
    """Chunks one after the other."""

    def __init__(self, chunks: list[StoredChunk]) -> None:
        self._chunks = chunks
        self.positions = torch.cat([c.positions for c in chunks])

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        parts = [c.layer(layer) for c in self._chunks]
        return torch.cat([k for k, _ in parts]), torch.cat([v for _, v in parts])
