"""A piece of KV cache outside the engine: what storage codecs encode and measurements alter.

Rows are what attention reads: keys behind their rotary embedding, values, one tensor per layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.engine.seams import KVCodec, PageGeometry


@dataclass(frozen=True)
class CachedRows:
    """``k[l]``, ``v[l]`` [T, Hkv, D] of the model's layer ``l``; int64 ``positions`` [T], absolute."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    positions: Tensor

    @property
    def tokens(self) -> int:
        """Rows of each layer."""
        return len(self.positions)

    def nbytes_16bit(self) -> int:
        """Bytes of these rows in 16 bits: the denominator of every ratio."""
        return 2 * sum(t.numel() for t in (*self.k, *self.v))


@dataclass(frozen=True)
class Reconstructed:
    """What a format gives back, and the ``payload`` bytes it needed.

    ``exempt`` rows were kept in 16 bits; their bytes are in ``payload`` too.
    """

    rows: CachedRows
    payload: int
    exempt: int = 0


RoundTrip = Callable[[CachedRows], Reconstructed]


def page_format(codec: KVCodec, page_size: int) -> RoundTrip:
    """The round trip of a format that attention reads: whole pages coded, an open page kept exact.

    Payload bytes are those of the planes of the pages that are coded, and 16 bits for rows that are not.
    """

    def run(rows: CachedRows) -> Reconstructed:
        heads, dim = rows.k[0].shape[1:]
        whole = rows.tokens if codec.grain == "token" else rows.tokens // page_size * page_size
        pages = -(-whole // page_size)
        if not pages:
            return Reconstructed(rows, rows.nbytes_16bit(), rows.tokens)
        geometry = PageGeometry(1, heads, dim, page_size, pages, rows.k[0].dtype, rows.k[0].device)
        payload = 4 * heads * dim * (rows.tokens - whole) * len(rows.k)
        out_k, out_v = [], []
        held: list[dict[str, Tensor]] = []
        for layer, (k, v) in enumerate(zip(rows.k, rows.v, strict=True)):
            bound = codec.at(layer)
            specs = bound.planes(geometry)
            own = {
                p.name: torch.zeros((pages, *p.shape), dtype=p.dtype, device=k.device)
                for p in specs
                if p.owner is None
            }
            planes = own | {p.name: held[p.owner][p.name] for p in specs if p.owner is not None}
            held.append(planes)
            where = torch.arange(whole, device=k.device)
            if codec.grain == "page":
                where = torch.arange(pages, device=k.device)
                bound.encode(planes, where, *(_paged(x[:whole], page_size) for x in (k, v)))
            else:
                bound.encode(planes, where, k[:whole], v[:whole])
            payload += sum(p.nbytes for p in own.values()) * whole // (pages * page_size)
            back = torch.empty((2, pages, heads, page_size, dim), dtype=k.dtype, device=k.device)
            bound.decode(planes, torch.arange(pages, device=k.device), back[0], back[1])
            flat = back.transpose(2, 3).reshape(2, pages * page_size, heads, dim)[:, :whole]
            out_k.append(torch.cat([flat[0], k[whole:]]))
            out_v.append(torch.cat([flat[1], v[whole:]]))
        done = CachedRows(tuple(out_k), tuple(out_v), rows.positions)
        return Reconstructed(done, payload, rows.tokens - whole)

    return run


def _paged(x: Tensor, size: int) -> Tensor:
    """[T, H, D] of whole pages as [n, H, P, D]."""
    tokens, heads, dim = x.shape
    return x.reshape(tokens // size, size, heads, dim).transpose(1, 2)
