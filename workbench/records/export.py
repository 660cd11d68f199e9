"""Runs as files: JSON to read back, and one self-contained HTML report.

Files appear whole or not at all: they are written beside their place and renamed into it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from workbench.records.page import page
from workbench.records.runfile import MAX_BYTES, dump_many, dumps, load_many
from workbench.spec.errors import RecordError
from workbench.spec.run import Run


def export_json(runs: Run | Sequence[Run], path: str | Path) -> Path:
    """Write one run, or several, as strict JSON; :func:`import_json` reads both. Returns the path."""
    text = dumps(runs) + "\n" if isinstance(runs, Run) else dump_many(runs)
    return write_atomically(text, Path(path))


def import_json(path: str | Path) -> list[Run]:
    """Runs of an exported file; raises :class:`RecordError` when it is too large, malformed, or not runs."""
    path = Path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecordError(f"{path} has {path.stat().st_size:,} bytes; at most {MAX_BYTES:,} are read.")
        return load_many(path.read_bytes())
    except OSError as err:
        raise RecordError(f"{path} cannot be read: {err.strerror}.") from None


def export_html(runs: Run | Sequence[Run], path: str | Path, title: str = "") -> Path:
    """Write a report of one run or several: no network, no script, light and dark. Returns the path."""
    runs = [runs] if isinstance(runs, Run) else list(runs)
    if not runs:
        raise RecordError("There is no run to report.", hint="Name at least one run.")
    return write_atomically(page(runs, title), Path(path))


def write_atomically(text: str, path: Path) -> Path:
    """Write ``text`` as UTF-8 so that a reader finds the old file or the new one, never a part."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)  # a temporary file is private; a report is not
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as err:
        raise RecordError(f"{path} cannot be written: {err.strerror}.") from None
    return path
