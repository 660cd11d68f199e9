"""The cache of downloaded and converted models: where it is, and how it stays consistent.

Everything that appears under a final name is complete: folders are written beside their place
and renamed, one process at a time holds the lock of a model, and content hashes are remembered
by size and modification time so that a start does not read hundreds of megabytes again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from workbench.models.progress import Cancel, check_cancel
from workbench.spec.errors import StorageError

_BLOCK = 4 << 20
_ELSEWHERE = "Set WORKBENCH_CACHE to a folder that can be written."


def cache_dir() -> Path:
    """``$WORKBENCH_CACHE``, else ``~/.cache/inference-workbench``; created on first use.

    Raises :class:`StorageError` where no such folder can be made.
    """
    root = os.environ.get("WORKBENCH_CACHE") or "~/.cache/inference-workbench"
    path = Path(root).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(
            f"The cache folder {path} cannot be made: {error.strerror}.", hint=_ELSEWHERE
        ) from None
    return path


@contextlib.contextmanager
def locked(
    name: str, cancel: Cancel | None = None, waits: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold the cross-process lock ``name``; waiting for another process honours ``cancel``.

    ``waits`` is called when it turns out that another holds it, every half second.
    Raises :class:`StorageError` in a folder that cannot be written.
    """
    folder = cache_dir() / "locks"
    lock = FileLock(folder / f"{name}.lock")
    while True:
        check_cancel(cancel, f"Waiting for another process that prepares {name}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0.5)
            break
        except Timeout:
            if waits is not None:
                waits()
        except OSError as error:
            raise StorageError(
                f"The cache folder {cache_dir()} cannot be written: {error.strerror}.", hint=_ELSEWHERE
            ) from None
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A fresh folder that becomes ``target`` when the block ends well, and vanishes when it fails.

    An older ``target`` is moved aside first, so that a reader sees the old one, nothing, or the
    new one, never a mixture.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        staging.chmod(0o755)
        yield staging
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            target.rename(old / "was")
            staging.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def sha256_file(path: Path, cancel: Cancel | None = None) -> str:
    """SHA-256 of the file's content, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            check_cancel(cancel, f"Hashing {path.name}")
            digest.update(block)
    return digest.hexdigest()


def remembered_sha256(path: Path) -> str:
    """``sha256_file(path)``, remembered in the cache (see ``remembered``)."""
    return remembered("sha256", [path], lambda: sha256_file(path))


def remembered(label: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """``compute()``, a hex digest of the files' contents, remembered until one of them changes.

    Kept in the cache folder under the real path, size and modification time (ns) of every file.
    """
    stats = [(path.resolve(), path.stat()) for path in files]
    state = "|".join(f"{real}:{stat.st_size}:{stat.st_mtime_ns}" for real, stat in stats)
    key = hashlib.sha256(f"{label}|{state}".encode()).hexdigest()[:32]
    try:
        note = cache_dir() / "digests" / f"{key}.json"
    except StorageError:  # costs time, not correctness; so does a folder that cannot be written
        return compute()
    try:
        known = json.loads(note.read_text())["digest"]
        if isinstance(known, str) and len(known) == 64:
            return known
    except (OSError, ValueError, KeyError, TypeError):
        pass
    value = compute()
    temporary = note.with_suffix(f".{os.getpid()}.tmp")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({"digest": value, "label": label, "files": [p.name for p in files]}))
        temporary.replace(note)
    except OSError:
        with contextlib.suppress(OSError):  # a full disk keeps the name of what it could not hold
            temporary.unlink(missing_ok=True)
    return value
