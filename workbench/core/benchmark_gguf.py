"""The GGUF file that two of the peers read, and what its weights are stored as."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from workbench.models.cache import remembered_sha256
from workbench.models.fetch import fetch_gguf
from workbench.models.gguf_source import GGUFSource
from workbench.models.progress import Progress
from workbench.models.registry import origin
from workbench.spec.errors import ModelNotFound


@dataclass(frozen=True)
class PeerFile:
    """A GGUF file; ``formats`` of its linear weights, the most common first; whether ours came from it."""

    path: Path
    formats: tuple[str, ...]
    ours: bool

    @property
    def format(self) -> str:
        """The format of most linear weights, e.g. Q4_1."""
        return self.formats[0]

    def __str__(self) -> str:
        whose = "" if self.ours else ", another source than our weights"
        return f"{self.path.name} ({', '.join(self.formats)}{whose})"


def peer_file(model: str, progress: Progress | None = None) -> PeerFile:
    """The file of a registry name or a ``.gguf`` path, fetched when it is not in the cache.

    Raises :class:`ModelNotFound` for a model without one, :class:`DownloadRefused` offline.
    """
    path = fetch_gguf(model, progress)
    try:
        note = origin(model)
    except ModelNotFound:  # a file that is opened directly, without a folder made of it
        note = {}
    ours = path == Path(model).expanduser() or note.get("file_sha256") == remembered_sha256(path)
    if ours and isinstance(grid := note.get("weight_grid"), str):
        return PeerFile(path, tuple(grid.split(", ")), ours)
    stored = GGUFSource(path).formats.items()
    linears = Counter(fmt for name, fmt in stored if name.endswith("_proj.weight"))
    return PeerFile(path, tuple(fmt for fmt, _ in linears.most_common()), ours)
