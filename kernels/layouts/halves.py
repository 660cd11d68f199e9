"""Two 4-bit codes in one byte, half a tile apart.

A kernel reads ``half`` bytes of a weight row and gets two runs of ``half`` consecutive inputs: the low
nibbles are inputs ``k .. k + half``, the high nibbles ``k + half .. k + 2 half``. Each run is one operand
of a matrix product as it stands; neighbours in one byte (the checkpoint order) would have to be interleaved
again in registers, byte by byte. Rows are padded with a code of the caller's choice to whole tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.spec.errors import OptionError, WrongShape


def padded(k: int, half: int) -> int:
    """``k`` inputs rounded up to whole tiles of ``2 * half``."""
    return -(-k // (2 * half)) * 2 * half


def pack_halves(codes: Tensor, half: int, fill: int = 0) -> Tensor:
    """Pack ``codes`` [..., k] in 0..15 to uint8 [..., padded(k) / 2].

    Raises :class:`OptionError` for a code beyond four bits.
    """
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) > 15):
        raise OptionError(
            f"Codes from {int(codes.min())} to {int(codes.max())} do not fit four bits.",
            hint="Clamp them to 0..15 before packing.",
        )
    k = codes.shape[-1]
    codes = F.pad(codes.to(torch.uint8), (0, padded(k, half) - k), value=fill)
    tiles = codes.unflatten(-1, (-1, 2, half))
    return (tiles[..., 0, :] | tiles[..., 1, :] << 4).flatten(-2).contiguous()


def unpack_halves(packed: Tensor, half: int, k: int) -> Tensor:
    """The codes [..., k] (uint8) that :func:`pack_halves` packed; :class:`WrongShape` for another width."""
    if packed.shape[-1] * 2 != padded(k, half):
        raise WrongShape(
            f"{k} inputs in halves of {half} take {padded(k, half) // 2} bytes, not {packed.shape[-1]}.",
            hint="Unpack with the half and the count they were packed with.",
        )
    tiles = packed.unflatten(-1, (-1, half))
    return torch.stack([tiles & 15, tiles >> 4], -2).flatten(-3)[..., :k].contiguous()
