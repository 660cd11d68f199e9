"""The file of a saved conversation: what it says of itself, written whole or not at all, read after checks.

It is the checked container of stored KV: token ids, then the streams of a codec at rest. The header names
everything that shaped the rows, so that a file of other weights, another release or another calibration is
refused by name before its body is read; a body longer than its header can explain is refused too.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from workbench.engine.at_rest import Bytes, Coded
from workbench.kv.container import START, head_size, payload_head, read_head, read_payload
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.spec.errors import PayloadError, StorageError

KIND, VERSION = "savedkv", 2
IDS = "ids"
_BLOCK = 8 << 20
_LARGEST_HEADER = 4 << 20
_AGAIN = "Save the conversation again."


@dataclass(frozen=True)
class Shaped:
    """What shaped cached rows, beside their tokens (law 4); every field is compared as it is."""

    weights: str
    config: str
    method: str
    dtype: str
    numerics: str
    page_size: int
    kv_format: str
    attention: str
    selector: str
    storage: str
    drafter: str


@dataclass(frozen=True)
class SavedHeader:
    """``tokens`` ids of which the first ``cached`` have KV; ``codec`` is a use, ``codec_key`` its identity.

    ``salt`` is the namespace that the rows were computed in; ``drafter`` says whose layers came along.
    """

    model: str
    shaped: Shaped
    codec: dict[str, Any]
    codec_key: str
    lossy: bool
    tokens: int
    cached: int
    salt: str
    drafter: str
    made_by: str
    pages: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> SavedHeader:
        """From plain data; raises :class:`PayloadError` for fields that are missing, odd or contradictory."""
        shaped = _typed(data.get("shaped"), Shaped, "shaped")
        header = _typed({**data, "shaped": Shaped(**shaped)}, cls, "header")
        made = cls(**header)
        size = made.shaped.page_size
        if size < 1 or not 0 < made.cached <= made.tokens or made.cached % size:
            raise PayloadError("The header of the saved conversation contradicts itself.", hint=_AGAIN)
        try:
            made.salt.encode()
        except UnicodeEncodeError:
            raise PayloadError("The saved conversation has no usable 'salt'.", hint=_AGAIN) from None
        return made


def path_of(value: object) -> Path:
    """A file name as a caller gave it. Raises :class:`StorageError` for what can name no file."""
    if not isinstance(value, str | os.PathLike) or not (text := os.fspath(value)) or "\0" in str(text):
        raise StorageError(f"{value!r} names no file.", hint="Give the path of a saved conversation.")
    return Path(value)


def check_place(path: Path) -> None:
    """Raises :class:`StorageError` where no file can come to be: found out before the work, not behind it.

    What is there and is no ordinary file stays: putting the file in place would take the place of a device.
    """
    try:
        there = path.exists()
        if there and not path.is_file():
            raise StorageError(
                f"{path} is no ordinary file.", hint="Name a new file, or a saved one to replace."
            )
        if not there and not path.parent.is_dir():
            raise StorageError(
                f"There is no folder {path.parent}.", hint="Make it, or save to another place."
            )
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}.", hint="Save to another place."
        ) from None


def write_saved(
    path: Path,
    header: SavedHeader,
    ids: list[int],
    coded: Coded,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> int:
    """Write the file and return its bytes.

    It appears under its name complete, or not at all: a temporary file beside it is removed on failure.
    Raises :class:`StorageError` when it cannot be written, and ``Cancelled``.
    """
    streams: dict[str, Bytes] = {IDS: np.array(ids, "<i4").tobytes(), **coded.streams}
    head = payload_head(KIND, VERSION, header.to_json(), streams)
    total, done = len(head) + sum(map(len, streams.values())), 0
    unfinished: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        unfinished = Path(name)
        with os.fdopen(handle, "wb") as file:
            for data in (head, *streams.values()):
                view = memoryview(data)
                for at in range(0, len(view), _BLOCK):
                    check_cancel(cancel, "Saving a conversation")
                    file.write(view[at : at + _BLOCK])
                    done += len(view[at : at + _BLOCK])
                    report(progress, done / total, "writing the file")
        unfinished.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}.",
            hint="Free some space, or save to another place.",
        ) from None
    finally:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
    return total


def read_saved(
    path: Path, check: Callable[[SavedHeader], int], vocab_size: int
) -> tuple[SavedHeader, list[int], Coded]:
    """Header, token ids and what a codec stored.

    ``check(header)`` raises for what may not be restored here, and returns the bytes that the streams may
    take at most. Raises :class:`PayloadError`, naming the file, what is wrong and where.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise PayloadError(f"{path} is no file.", hint="Give a saved conversation.")
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            begin = file.read(START)
            size = head_size(begin, length)
            if size > _LARGEST_HEADER:
                raise PayloadError(f"Its header claims {size:,} bytes.", hint=_AGAIN)
            begin += file.read(size - START)
            head = read_head(begin, length, KIND, VERSION)
            header = SavedHeader.read(head.header)
            most = check(header)
            if length - size > most:
                raise PayloadError(
                    f"It has {length - size:,} bytes; its {header.cached:,} tokens explain {most:,} at most.",
                    hint=_AGAIN,
                )
            data = begin + file.read(length - size)
        payload = read_payload(data, KIND, VERSION)
        ids = np.frombuffer(payload.stream(IDS, 4 * header.tokens), "<i4")
    except OSError as error:
        raise PayloadError(
            f"The saved conversation {path} cannot be read: {error.strerror or error}.",
            hint="Check the name.",
        ) from None
    except PayloadError as error:
        raise PayloadError(f"{path.name}: {error.message}", hint=error.hint) from None
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise PayloadError(f"{path.name} holds token ids that this model does not have.", hint=_AGAIN)
    streams = {name: s for name, s in payload.streams.items() if name != IDS}
    return header, ids.tolist(), Coded(header.pages, streams)


def _typed(data: object, kind: type, what: str) -> dict[str, Any]:
    """The fields of a dataclass from plain data, each of its annotated type."""
    types = {"str": str, "int": int, "bool": bool, "Shaped": Shaped, "dict[str, Any]": dict}
    if not isinstance(data, Mapping):
        raise PayloadError(f"The saved conversation has no usable {what!r}.", hint=_AGAIN)
    out = {}
    for field in fields(kind):
        value = data.get(field.name)
        if type(value) is not types[str(field.type)]:
            raise PayloadError(f"The saved conversation has no usable {field.name!r}.", hint=_AGAIN)
        out[field.name] = value
    return out
