"""Where coded pages of the cold tier lie: in memory, or in a folder that goes with the session.

A page on disk is a payload like any other: checked when it comes back. Folders are private to a process, so
nothing in them outlives it but by a crash; the system's folder for temporary files is where crashes leave
things.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import weakref
from pathlib import Path

from workbench.engine.at_rest import Coded
from workbench.kv.container import read_payload, write_payload
from workbench.spec.errors import PayloadError, StorageError

KIND, VERSION = "coldpage", 1


class RamStore:
    """Coded pages in memory."""

    def __init__(self) -> None:
        self._pages: dict[int, Coded] = {}
        self.memory = 0

    def put(self, number: int, coded: Coded) -> int:
        """Keep the streams; views are copied, since what they look at may change."""
        kept = Coded(dict(coded.header), {n: bytes(s) for n, s in coded.streams.items()})
        self._pages[number] = kept
        self.memory += kept.nbytes
        return kept.nbytes

    def get(self, number: int) -> Coded:
        """The page."""
        return self._pages[number]

    def drop(self, number: int) -> None:
        """Free it."""
        self.memory -= self._pages.pop(number).nbytes

    def close(self) -> None:
        """Free all."""
        self._pages.clear()
        self.memory = 0


class DiskStore:
    """Coded pages as files of a fresh folder below ``parent`` (default: the system's for temporary files).

    The folder is made with the first page, and removed by :meth:`close`, or when the store is collected.
    """

    memory = 0

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._folder: Path | None = None
        self._closed = False

    @property
    def folder(self) -> Path | None:
        """Where the files are; None before the first page and after the end."""
        return self._folder

    def put(self, number: int, coded: Coded) -> int:
        """Write a file, whole or not at all; raises :class:`StorageError`."""
        data = write_payload(KIND, VERSION, {"pages": dict(coded.header)}, coded.streams)
        path = self._path(number)
        try:
            path.write_bytes(data)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise _unusable(path, "written", error) from None
        return len(data)

    def get(self, number: int) -> Coded:
        """Read and check a file; raises :class:`StorageError` or :class:`PayloadError`."""
        path = self._path(number)
        try:
            payload = read_payload(path.read_bytes(), KIND, VERSION)
        except FileNotFoundError:
            raise PayloadError(f"The cold page {path.name} is gone.", hint="It is computed again.") from None
        except OSError as error:
            raise _unusable(path, "read", error) from None
        header = payload.header.get("pages")
        if not isinstance(header, dict):
            raise PayloadError(f"The cold page {path.name} has no header.", hint="It is computed again.")
        return Coded(header, payload.streams)

    def drop(self, number: int) -> None:
        """Remove a file; one that is gone already is no error."""
        path = self._path(number)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _unusable(path, "removed", error) from None

    def close(self) -> None:
        """Remove the folder; what cannot be removed stays, and costs disk."""
        self._closed = True
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _path(self, number: int) -> Path:
        if self._closed:
            raise StorageError("The cold tier's folder is closed.", hint="Apply the recipe again.")
        if self._folder is None:
            try:
                self._folder = Path(tempfile.mkdtemp(prefix="workbench-cold-", dir=self._parent))
            except OSError as error:
                raise _unusable(Path(tempfile.gettempdir()), "written", error) from None
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        return self._folder / f"{number}.page"


def _unusable(path: Path, what: str, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be {what}: {error.strerror or error}.",
        hint="Free some space, or keep cold pages in memory (where=ram).",
    )
