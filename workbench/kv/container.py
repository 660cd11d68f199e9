"""Self-contained bytes of stored KV: a checked prefix, a JSON header, named byte streams.

Little endian::

    4  magic  "\\x89WKV"          8  format name, ASCII, zero padded
    2  version of the format      4  H, bytes of the header
    8  length of the whole        4  CRC-32 of the prefix so far and the header
    H  {"header": {...}, "streams": [[name, bytes, crc32], ...]}
       the streams, one after the other

Everything is checked before it is used, so a payload that is cut off, damaged or of another kind is refused
by name and place. There is no pickle, and nothing is allocated on a payload's word alone.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.spec.errors import PayloadError

MAGIC = b"\x89WKV"
_PREFIX = struct.Struct("<4s8sHIQ")
_CRC = struct.Struct("<I")
START = _PREFIX.size + _CRC.size
_AGAIN = "Get it again from where it was stored."


@dataclass(frozen=True)
class Payload:
    """``header`` is the format's own; ``streams`` are views into the bytes read."""

    header: dict[str, Any]
    streams: dict[str, memoryview]

    def stream(self, name: str, nbytes: int | None = None) -> memoryview:
        """A stream by name, of ``nbytes`` bytes if given; raises :class:`PayloadError` when it is not so."""
        found = self.streams.get(name)
        if found is None:
            raise PayloadError(f"The stored KV has no stream {name!r}.", hint=_AGAIN)
        if nbytes is not None and len(found) != nbytes:
            raise PayloadError(
                f"Stream {name!r} has {len(found):,} bytes; its header implies {nbytes:,}.", hint=_AGAIN
            )
        return found


def write_payload(
    kind: str, version: int, header: Mapping[str, Any], streams: Mapping[str, bytes | bytearray | memoryview]
) -> bytes:
    """The bytes of a payload; equal arguments give equal bytes."""
    return b"".join((payload_head(kind, version, header, streams), *streams.values()))


def payload_head(
    kind: str, version: int, header: Mapping[str, Any], streams: Mapping[str, bytes | bytearray | memoryview]
) -> bytes:
    """What comes before the streams, for whoever writes those one after the other."""
    table = [[name, len(data), zlib.crc32(data)] for name, data in streams.items()]
    text = json.dumps(
        {"header": header, "streams": table}, sort_keys=True, separators=(",", ":"), allow_nan=False
    ).encode()
    total = START + len(text) + sum(len(d) for d in streams.values())
    prefix = _PREFIX.pack(MAGIC, kind.encode("ascii"), version, len(text), total)
    return b"".join((prefix, _CRC.pack(zlib.crc32(text, zlib.crc32(prefix))), text))


@dataclass(frozen=True)
class Head:
    """A checked prefix and header: ``table`` names the streams, their bytes and checksums from ``at`` on."""

    header: dict[str, Any]
    table: list[tuple[str, int, int]]
    at: int


def head_size(data: bytes | memoryview, length: int) -> int:
    """Bytes of prefix and header of a payload of ``length`` bytes that begins with ``data``.

    Raises :class:`PayloadError` when it is no payload, or not as long as it says.
    """
    if len(data) < START:
        raise PayloadError(f"Stored KV begins with {START} bytes; only {len(data)} are here.", hint=_AGAIN)
    magic, _, _, size, total = _PREFIX.unpack(data[: _PREFIX.size])
    if magic != MAGIC:
        raise PayloadError(
            "This is no stored KV: its first four bytes are not the mark.", hint="Check the file."
        )
    if START + size > length or total != length:
        raise PayloadError(
            f"The stored KV should have {max(total, START + size):,} bytes; {length:,} are here.",
            hint=_AGAIN,
        )
    return START + int(size)


def read_head(data: bytes | memoryview, length: int, kind: str, version: int) -> Head:
    """Check prefix and header of a payload of ``length`` bytes; ``data`` begins with them.

    Raises :class:`PayloadError` as :func:`read_payload` does, but for the streams.
    """
    view = memoryview(data)
    end = head_size(view, length)
    if len(view) < end:
        raise PayloadError(f"The header of the stored KV ends at byte {end:,}; not all is here.", hint=_AGAIN)
    _, name, found, _, _ = _PREFIX.unpack(view[: _PREFIX.size])
    text = bytes(view[START:end])
    (crc,) = _CRC.unpack(view[_PREFIX.size : START])
    if zlib.crc32(text, zlib.crc32(view[: _PREFIX.size])) != crc:
        raise PayloadError(f"The header of the stored KV (bytes 0 to {end}) is damaged.", hint=_AGAIN)
    if name.rstrip(b"\0") != kind.encode("ascii"):
        raise PayloadError(
            f"The stored KV is in format {name.rstrip(bytes(1)).decode('ascii', 'replace')!r}, not {kind!r}.",
            hint="Decode it with the codec that wrote it.",
        )
    if found != version:
        raise PayloadError(
            f"The stored KV has version {found} of format {kind!r}; this codec reads version {version}.",
            hint="Encode it again, or use the release that wrote it.",
        )
    try:
        told = json.loads(text)
        header, table = dict(told["header"]), [(str(n), int(b), int(c)) for n, b, c in told["streams"]]
    except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError) as err:  # 1e999 is no length
        raise PayloadError(f"The header of the stored KV cannot be read: {err}.", hint=_AGAIN) from None
    return Head(header, table, end)


def read_payload(data: bytes | memoryview, kind: str, version: int) -> Payload:
    """Check and split a payload of format ``kind``.

    Raises :class:`PayloadError`, naming what is wrong and at which byte, when it is truncated or longer than
    it says, damaged, of another format, or of a version other than ``version``.
    """
    view = memoryview(data)
    head = read_head(view, len(view), kind, version)
    return Payload(head.header, _streams(view, head.at, head.table))


def _streams(view: memoryview, at: int, table: list[tuple[str, int, int]]) -> dict[str, memoryview]:
    streams = {}
    for name, size, crc in table:
        part = view[at : at + size] if size >= 0 else view[:0]
        if len(part) != size:
            raise PayloadError(
                f"Stream {name!r} should have {size:,} bytes; {len(part):,} are here.", hint=_AGAIN
            )
        if zlib.crc32(part) != crc:
            raise PayloadError(f"Stream {name!r} (bytes {at:,} to {at + size:,}) is damaged.", hint=_AGAIN)
        streams[name] = part
        at += size
    if at != len(view):
        raise PayloadError(f"The stored KV has {len(view) - at:,} bytes that no stream owns.", hint=_AGAIN)
    return streams
