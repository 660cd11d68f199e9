"""Codes of 1 to 8 bits, packed into bytes for real.

The layout is *planar*: a width is a sum of powers of two (3 = 2 + 1, 6 = 4 + 2), and each power ``w``
gets its own run of bytes. Within a run the axis is cut into ``8 / w`` consecutive parts, and byte ``i``
holds code ``i`` of every part, part ``p`` in bits ``p*w`` and up. So unpacking is one shift, one mask
and one copy of a contiguous block per part, and never interleaves neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.spec.errors import OptionError


def powers(bits: int) -> tuple[int, ...]:
    """The powers of two that make up ``bits``, largest first; raises :class:`OptionError` outside 1..8."""
    if not 1 <= bits <= 8:
        raise OptionError(f"Codes of {bits} bits cannot be packed.", hint="Choose a width from 1 to 8 bits.")
    return tuple(w for w in (8, 4, 2, 1) if bits & w)


def packed_size(n: int, bits: int) -> int:
    """Bytes that :func:`pack` makes of ``n`` codes: ``ceil(n * bits / 8)`` when ``n`` is a multiple of 8."""
    return sum(-(-n * w // 8) for w in powers(bits))


def pack(codes: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Pack integer ``codes`` in 0..2^bits - 1 along ``dim``.

    Returns uint8 of the same shape but for ``dim``, which is ``packed_size(n, bits)``. The axis is padded
    with zeros where a part would be short. Raises :class:`OptionError` for a width outside 1..8 or a code
    that does not fit it: codes are never cut off silently.
    """
    widths = powers(bits)
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) >> bits):
        raise OptionError(
            f"Codes from {int(codes.min())} to {int(codes.max())} do not fit {bits} bits.",
            hint="Clamp them to the width before packing, or pack at a larger one.",
        )
    codes, runs, shift = codes.to(torch.uint8).movedim(dim, 0), [], 0
    n = codes.shape[0]
    for w in widths:
        parts, size = 8 // w, -(-n * w // 8)
        field = (codes >> shift) & (2**w - 1)
        field = torch.cat([field, field.new_zeros(parts * size - n, *field.shape[1:])])
        run = field.new_zeros(size, *field.shape[1:])
        for p, part in enumerate(torch.split(field, size)):
            run |= part << (p * w)
        runs.append(run)
        shift += w
    return torch.cat(runs).movedim(0, dim).contiguous()


def unpack(packed: Tensor, bits: int, n: int, dim: int = -1) -> Tensor:
    """The ``n`` codes along ``dim`` that :func:`pack` packed; uint8.

    Raises :class:`OptionError` when the axis does not hold exactly ``packed_size(n, bits)`` bytes.
    """
    if packed.shape[dim] != packed_size(n, bits):
        raise OptionError(
            f"{n} codes of {bits} bits take {packed_size(n, bits)} bytes, not {packed.shape[dim]}.",
            hint="Unpack with the width and count they were packed with.",
        )
    packed = packed.movedim(dim, 0)
    out, shift, start = packed.new_zeros(n, *packed.shape[1:]), 0, 0
    for w in powers(bits):
        size = -(-n * w // 8)
        run = packed[start : start + size]
        field = torch.cat([(run >> (p * w)) & (2**w - 1) for p in range(8 // w)])[:n]
        out |= field << shift
        shift, start = shift + w, start + size
    return out.movedim(0, dim).contiguous()
