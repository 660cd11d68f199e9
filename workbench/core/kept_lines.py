"""What was measured already, kept on disk: what makes a long measurement go on where it was stopped.

One JSON line per result, appended whole under a lock, so a process that is killed loses at most the line it
was writing, and such a line is passed over. The key of a line names everything that shaped it. A file that
cannot be written costs time, not correctness.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from filelock import FileLock, Timeout

from workbench.models.cache import cache_dir
from workbench.spec.errors import StorageError

_LOCK_SECONDS = 10.0
Result = TypeVar("Result")


class KeptLines(Generic[Result]):
    """Results by key, in one file; read once, when it is made, or not at all when it shall be ``fresh``.

    ``name``: the file in the cache folder, where no ``path`` is given. ``read`` and ``write``: a result from
    and to plain JSON data.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[Any], Result],
        write: Callable[[Result], Any],
        path: Path | None = None,
        *,
        fresh: bool = False,
    ) -> None:
        self.trouble = ""
        self._write = write
        self._known: dict[str, Result] = {}
        try:
            self.path: Path | None = path or cache_dir() / "points" / name
            lines = self.path.read_bytes().splitlines() if self.path.exists() and not fresh else []
        except (OSError, StorageError) as error:
            self.path, lines, self.trouble = None, [], str(error)
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                data = json.loads(line)
                if isinstance(data["key"], str):
                    self._known[data["key"]] = read(data["result"])

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: str) -> Result | None:
        """What was measured under ``key``, if it was."""
        return self._known.get(key)

    def put(self, key: str, result: Result) -> None:
        """Keep a result; :attr:`trouble` says why it is kept in memory only."""
        self._known[key] = result
        if self.path is None:
            return
        line = json.dumps({"key": key, "result": self._write(result)}, separators=(",", ":")) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=_LOCK_SECONDS), self.path.open("a+b") as file:
                size = file.seek(0, os.SEEK_END)
                torn = bool(size) and (file.seek(size - 1), file.read(1))[1] != b"\n"
                file.write((b"\n" if torn else b"") + line.encode())
        except (OSError, Timeout) as error:
            self.path, self.trouble = None, str(error)
