"""What was measured once per weight set, kept in the cache folder.

Files appear under their names only when complete, and one process at a time makes one. A cache that cannot
be written or is full costs time, not correctness: what was measured serves this process alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import safetensors

from workbench.models.cache import cache_dir, locked
from workbench.models.progress import Cancel
from workbench.spec.errors import PayloadError, StorageError

T = TypeVar("T")


def kept(
    name: str,
    read: Callable[[Path], T | None],
    make: Callable[[], T],
    write: Callable[[Path, T], None],
    cancel: Cancel | None = None,
) -> T:
    """The artefact ``name``: as ``read`` (None: there is none that can be read), or made and written.

    Raises what ``make`` raises, and ``Cancelled`` while another process makes it.
    """
    with contextlib.ExitStack() as stack:
        path, ours = None, True
        try:
            path = cache_dir() / "calibration" / f"{name}.safetensors"
            stack.enter_context(locked(name, cancel))
        except StorageError:
            ours = False
        found = read(path) if path is not None else None
        if found is None:
            found = make()
            if path is not None and ours:
                _keep(path, found, write)
        return found


def require_measuring(what: str, known: bool) -> None:
    """Raise :class:`PayloadError` when only what is on disk will do, and it is not there."""
    if known:
        raise PayloadError(
            f"This model was not calibrated for {what} in this cache folder.",
            hint=f"Calibrate it once: save a conversation with {what}, or switch {what} on.",
        )


def _keep(path: Path, found: T, write: Callable[[Path, T], None]) -> None:
    unfinished = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(unfinished, found)
        unfinished.replace(path)
    except (OSError, safetensors.SafetensorError):
        with contextlib.suppress(OSError):
            unfinished.unlink()
