"""Windows that were measured already, kept on disk: what makes a sweep go on where it was stopped."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from workbench.core.kept_lines import KeptLines
from workbench.core.kv_result import WindowResult


class Points(KeptLines[WindowResult]):
    """Windows by key, one line per method and window; ``path`` None: in the cache folder."""

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        super().__init__("p1.jsonl", WindowResult.from_dict, WindowResult.to_dict, path, fresh=fresh)


def point_key(*parts: object) -> str:
    """A digest of everything that shapes a point."""
    text = "\n".join(p if isinstance(p, str) else repr(p) for p in parts)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def window_part(ids: Sequence[int], start: int) -> str:
    """A window's share of a key."""
    return point_key("window", list(ids), start)
