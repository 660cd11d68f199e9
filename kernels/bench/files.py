"""A run's folder: ``results.json``, replaced whole after every step, and ``report.html`` at its end."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workbench.kernels.bench.page import page
from workbench.spec.errors import StorageError

RESULTS, REPORT = "results.json", "report.html"


def prepare(folder: Path) -> Path:
    """Make the folder; raises ``StorageError`` when it cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise _unwritable(folder, error) from None


def save(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the results as they are now; the file is never half written."""
    _replace(folder / RESULTS, json.dumps(strict(record), indent=1, allow_nan=False) + "\n")


def report(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write the page; returns its path."""
    _replace(folder / REPORT, page(record))
    return folder / REPORT


def strict(value: Any) -> Any:
    """Strict JSON data: tuples as lists, numbers that are not finite as null."""
    if isinstance(value, Mapping):
        return {str(k): strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [strict(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> None:
    written = path.with_suffix(path.suffix + ".part")
    try:
        written.write_text(text, encoding="utf-8")
        os.replace(written, path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be written: {error.strerror}.",
        hint="Free some space, or name another place with --out.",
    )
