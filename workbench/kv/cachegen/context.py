"""A whole context: cut into chunks, every chunk at every level, and put together again from any choice.

Chunks are a multiple of 10 tokens (an anchor and its group) and of 16 (a page), so both line up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.kv.cached import CachedRows, Reconstructed, RoundTrip
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.levels import LEVELS, Level
from workbench.models.progress import Cancel, Progress, check_cancel, part
from workbench.spec.errors import OptionError

CHUNK = 160  # tokens; what is on the way when the bandwidth drops is lost time, so small pays


def spans(tokens: int, chunk: int = CHUNK) -> list[tuple[int, int]]:
    """Begin and end of every chunk; the last may be short. Raises :class:`OptionError` for ``chunk`` < 1."""
    if chunk < 1:
        raise OptionError(f"cachegen cannot cut chunks of {chunk} tokens.", hint="160 is a good size.")
    return [(begin, min(begin + chunk, tokens)) for begin in range(0, tokens, chunk)]


def encode_context(
    codec: CacheGen,
    rows: CachedRows,
    levels: Sequence[Level] = LEVELS,
    *,
    chunk: int = CHUNK,
    trim: bool = False,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> list[list[bytes]]:
    """Payloads ``[chunk][level]`` of rows at consecutive positions; raises what :meth:`CacheGen.encode` does.

    A chunk's bytes do not depend on what follows it, so it can begin other contexts too, and be followed by
    text. With ``trim`` they leave out what sliding windows at the end of *this* context no longer reach: less
    to send, for a context that is fetched whole. ``Cancelled`` between two layers.
    """
    out: list[list[bytes]] = []
    cuts = spans(rows.tokens, chunk)
    context = int(rows.positions[-1]) + 1 if rows.tokens and trim else None
    for i, (begin, end) in enumerate(cuts):
        piece, versions = cut(rows, begin, end), []
        for j, level in enumerate(levels):
            check_cancel(cancel, "Coding a context")
            at = (i * len(levels) + j) / (len(cuts) * len(levels))
            told = part(progress, at, at + 1 / (len(cuts) * len(levels)))
            versions.append(codec.encode(piece, level, context=context, progress=told, cancel=cancel))
        out.append(versions)
    return out


def cut(rows: CachedRows, begin: int, end: int) -> CachedRows:
    """Rows ``begin`` to ``end``."""
    piece = slice(begin, end)
    return CachedRows(tuple(x[piece] for x in rows.k), tuple(x[piece] for x in rows.v), rows.positions[piece])


def join(pieces: Sequence[CachedRows]) -> CachedRows:
    """Chunks one after the other."""
    return CachedRows(
        tuple(torch.cat(layer) for layer in zip(*(p.k for p in pieces), strict=True)),
        tuple(torch.cat(layer) for layer in zip(*(p.v for p in pieces), strict=True)),
        torch.cat([p.positions for p in pieces]),
    )


def round_trip(codec: CacheGen, level: Level, *, chunk: int = CHUNK) -> RoundTrip:
    """Encode and decode every chunk at one level, with the bytes it took: what measurements call."""

    def run(rows: CachedRows) -> Reconstructed:
        if not rows.tokens:
            return Reconstructed(rows, 0)
        payloads = [versions[0] for versions in encode_context(codec, rows, [level], chunk=chunk)]
        done = join([codec.decode(data) for data in payloads])
        return Reconstructed(done, sum(map(len, payloads)))

    return run
