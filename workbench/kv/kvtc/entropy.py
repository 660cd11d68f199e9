"""The entropy stage by name: packed as they are, DEFLATE, or the adaptive range coder."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from workbench.kv.container import Payload
from workbench.kv.kvtc import deflate, ranges
from workbench.kv.kvtc.codes import Coder, Codes

Entropy = Literal["none", "deflate", "range"]
STAGES: tuple[Entropy, ...] = ("none", "deflate", "range")


def to_streams(
    codes: Codes, coder: Coder, entropy: Entropy, side: str, expected: Tensor | None
) -> dict[str, bytes]:
    """Named streams of one side (``k`` or ``v``); ``expected`` coefficients help the range coder."""
    if entropy == "range":
        return {f"{side}.range": ranges.encode(codes, coder, expected)}
    streams = deflate.packed(codes)
    if entropy == "deflate":
        streams = {name: deflate.deflate(data) for name, data in streams.items()}
    return {f"{side}.{name}": data for name, data in streams.items()}


def from_streams(
    payload: Payload,
    coder: Coder,
    entropy: Entropy,
    side: str,
    tokens: int,
    expected: Tensor | None,
) -> Codes:
    """What :func:`to_streams` made; raises :class:`PayloadError` for streams it cannot have made."""
    if entropy == "range":
        return ranges.decode(payload.stream(f"{side}.range"), coder, tokens, expected)
    streams: dict[str, bytes | memoryview] = {}
    for name, size in deflate.packed_sizes(coder, tokens).items():
        full = f"{side}.{name}"
        if entropy == "deflate":
            streams[name] = deflate.inflate(payload.stream(full), size, full)
        else:
            streams[name] = payload.stream(full, size)
    return deflate.unpacked(coder, tokens, streams)
