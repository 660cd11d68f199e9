"""Windows that were measured already, kept on disk: what makes a sweep go on where it was stopped.

One JSON line per method and window, appended whole under a lock, so a process that is killed loses at most
the line it was writing, and such a line is passed over. The key of a line names everything that shaped it. A
file that cannot be written costs time, not correctness.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from workbench.core.kv_result import WindowResult
from workbench.models.cache import cache_dir
from workbench.spec.errors import StorageError

_LOCK_SECONDS = 10.0


class Points:
    """Results by key, in one file; read once, when it is made, or not at all when it shall be ``fresh``.

    ``path`` None: in the cache folder.
    """

    def __init__(self, path: Path | None = None, *, fresh: bool = False) -> None:
        self.trouble = ""
        self._known: dict[str, WindowResult] = {}
        try:
            self.path: Path | None = path or cache_dir() / "points" / "p1.jsonl"
            lines = self.path.read_bytes().splitlines() if self.path.exists() and not fresh else []
        except (OSError, StorageError) as error:
            self.path, lines, self.trouble = None, [], str(error)
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                data = json.loads(line)
                if isinstance(data["key"], str):
                    self._known[data["key"]] = WindowResult.from_dict(data["result"])

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> WindowResult | None:
        """What was measured under ``key``, if it was."""
        return self._known.get(key)

    def put(self, key: str, result: WindowResult) -> None:
        """Keep a result; :attr:`trouble` says why it is kept in memory only."""
        self._known[key] = result
        if self.path is None:
            return
        line = json.dumps({"key": key, "result": result.to_dict()}, separators=(",", ":")) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS), self.path.open("a+b") as file:
                size = file.seek(0, os.SEEK_END)
                torn = bool(size) and (file.seek(size - 1), file.read(1))[1] != b"\n"
                file.write((b"\n" if torn else b"") + line.encode())
        except (OSError, Timeout) as error:
            self.path, self.trouble = None, str(error)


def point_key(*parts: object) -> str:
    """A digest of everything that shapes a point."""
    text = "\n".join(p if isinstance(p, str) else repr(p) for p in parts)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def window_part(ids: Sequence[int], start: int) -> str:
    """A window's share of a key."""
    return point_key("window", list(ids), start)
