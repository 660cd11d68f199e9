"""E8P weights, 2 bits each: one 16-bit code per 8 inputs and one float32 scale per output row.

``weight = codeword * row_scale`` (:mod:`workbench.numerics.e8p`). QuIP# multiplies in a rotated basis; its
sign vectors and Hadamard transforms act on activations and outputs, and a sign vector of the output side may
be part of ``row_scale``. Codes lie [N, K / 8] in the order of the inputs, rows padded to whole tiles of 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.numerics import e8p
from workbench.spec.errors import WrongShape

TILE = 128


@dataclass(frozen=True)
class E8P:
    """``codes`` int16 [N, Kp / 8], ``row_scale`` float32 [N]; ``k`` inputs, Kp in whole tiles of 128."""

    codes: Tensor
    row_scale: Tensor
    k: int

    @property
    def n(self) -> int:
        """Output rows."""
        return self.codes.shape[0]

    def values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights [N, K], computed in ``dtype``."""
        words = e8p.decode(self.codes, dtype).flatten(1)[:, : self.k]
        return words * self.row_scale.to(dtype)[:, None]


def pack_e8p(codes: Tensor, row_scale: float | Tensor) -> E8P:
    """Pack codes [N, K / 8] (0..65535) with a scale for all rows or one each.

    What pads a row meets zeros of the activations. Raises :class:`WrongShape` when sizes disagree.
    """
    if codes.ndim != 2:
        raise WrongShape(f"E8P codes {tuple(codes.shape)} must be a matrix [N, K / 8].")
    n, words = codes.shape
    scales = torch.as_tensor(row_scale, dtype=torch.float32, device=codes.device)
    if scales.ndim and tuple(scales.shape) != (n,):
        raise WrongShape(f"Row scales {tuple(scales.shape)} do not fit {n} rows.")
    low = codes.long() & 0xFFFF
    signed = torch.where(low > 32767, low - 65536, low).to(torch.int16)
    padded = F.pad(signed, (0, -words % (TILE // 8))).contiguous()
    return E8P(padded, scales.expand(n).contiguous(), words * 8)


def table(device: torch.device | str) -> Tensor:
    """The patterns as the kernel reads them: int16 [256], entry j's (2 |x| - 1) / 2 in bits 2j and 2j + 1.

    512 bytes, read through the first-level cache. The parity of a pattern is that of its odd entries here.
    """
    fields = (e8p.patterns().int() - 1) // 2 << torch.arange(0, 16, 2, dtype=torch.int32)
    words = fields.sum(1)
    return torch.where(words > 32767, words - 65536, words).to(torch.int16).to(device)
