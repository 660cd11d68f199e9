"""Codes as packed bytes, and those bytes through DEFLATE: the paper's entropy stage.

Codes lie component by component, so that one component's codes share bytes and DEFLATE's Huffman codes see
their joint law; the two bytes of shifts and scales lie apart, since only the first has structure.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from workbench.kv.kvtc.codes import Coder, Codes
from workbench.kv.kvtc.formats import BITS
from workbench.numerics.packing import pack, packed_size, unpack
from workbench.spec.errors import PayloadError

_RAW = -15  # bare DEFLATE: the container has its own checksums


def packed(codes: Codes) -> dict[str, bytes]:
    """Streams ``shift``, ``scale`` and one per format in use; exactly the plan's bits for T % 8 == 0."""
    out = {"shift": _halves(codes.shift), "scale": _halves(codes.scale)}
    for kind, symbols in codes.symbols.items():
        if symbols.shape[1]:
            out[kind] = pack(symbols.T, BITS[kind]).numpy().tobytes()
    return out


def unpacked(coder: Coder, tokens: int, streams: Mapping[str, bytes | memoryview]) -> Codes:
    """What :func:`packed` packed; raises :class:`PayloadError` for a stream of another length."""
    groups = len(coder.plan.groups)
    wanted = packed_sizes(coder, tokens)
    for name, size in wanted.items():
        if name not in streams or len(streams[name]) != size:
            raise PayloadError(
                f"Stream {name!r} should unpack to {size:,} bytes, not {len(streams.get(name, b'')):,}.",
                hint="It was not written by this codec.",
            )
    symbols = {}
    for kind, width in coder.widths.items():
        if width:
            flat = torch.from_numpy(np.frombuffer(streams[kind], np.uint8).copy()).view(width, -1)
            symbols[kind] = unpack(flat, BITS[kind], tokens).T
        else:
            symbols[kind] = torch.zeros(tokens, 0, dtype=torch.uint8)
    shift, scale = (_from_halves(streams[n], tokens, groups) for n in ("shift", "scale"))
    return Codes(shift, scale, symbols)


def packed_sizes(coder: Coder, tokens: int) -> dict[str, int]:
    """Bytes of each stream of :func:`packed`."""
    header = 2 * tokens * len(coder.plan.groups)
    out = {"shift": header, "scale": header}
    for kind, width in coder.widths.items():
        if width:
            out[kind] = width * packed_size(tokens, BITS[kind])
    return out


def deflate(data: bytes) -> bytes:
    """Smallest DEFLATE of zlib."""
    stream = zlib.compressobj(9, zlib.DEFLATED, _RAW, 9)
    return stream.compress(data) + stream.flush()


def inflate(data: bytes | memoryview, size: int, name: str) -> bytes:
    """Exactly ``size`` bytes, and never more memory than that; else raises :class:`PayloadError`."""
    stream = zlib.decompressobj(_RAW)
    try:
        out = stream.decompress(data, size + 1)
    except zlib.error as err:
        raise PayloadError(f"Stream {name!r} is no DEFLATE stream: {err}.", hint="Get it again.") from None
    if len(out) != size or not stream.eof or stream.unused_data:
        raise PayloadError(f"Stream {name!r} does not inflate to {size:,} bytes.", hint="Get it again.")
    return out


def _halves(x: Tensor) -> bytes:
    """float16 [T, G] as all low bytes, then all high ones, group by group."""
    return np.ascontiguousarray(x.numpy().T).reshape(-1, 1).view(np.uint8).T.tobytes()


def _from_halves(data: bytes | memoryview, tokens: int, groups: int) -> Tensor:
    pairs = np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(2, -1).T)
    return torch.from_numpy(pairs.view(np.float16).reshape(groups, tokens).T.copy())
