"""Byte strings one behind the other, each behind its length (uint32, little endian)."""

from __future__ import annotations

import struct

from workbench.engine.at_rest import Bytes
from workbench.spec.errors import PayloadError

_LENGTH = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    """One of them."""
    return _LENGTH.pack(len(data)) + data


def frames(data: Bytes) -> list[memoryview]:
    """All of them, at least one; raises :class:`PayloadError` for a length that goes beyond the end."""
    view, at, found = memoryview(data), 0, list[memoryview]()
    while at < len(view):
        begin = at + _LENGTH.size
        end = begin + (_LENGTH.unpack(view[at:begin])[0] if begin <= len(view) else 0)
        if end > len(view) or begin > len(view):
            raise PayloadError(
                f"The stored rows end at byte {len(view):,}, inside what begins at byte {at:,}.",
                hint="Save them again.",
            )
        found.append(view[begin:end])
        at = end
    if not found:
        raise PayloadError("There are no stored rows.", hint="Save them again.")
    return found
