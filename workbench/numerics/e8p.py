"""E8P: eight weights in 16 bits, a padded ball of the lattice E8 (QuIP#, arXiv 2402.04396, section 4.2).

A codeword is a half-integer vector with even sum, moved by +1/4 or -1/4 in all entries. Its magnitudes are
one of 256 patterns: the 227 of squared norm at most 10, and 29 of the 56 of squared norm 12 (five 1.5, three
0.5; the first in lexicographic order, so codes are not those of another implementation's checkpoints). Bits:
0 the shift (1: +1/4), 1 to 7 the signs of entries 0 to 6 (1: negative), 8 to 15 the pattern. The eighth sign
follows, because the sum must be even. Four times a codeword is a vector of odd integers in -11..11.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import torch
from torch import Tensor

from workbench.spec.errors import WrongShape

PATTERNS = 256
_CHUNK = 2048  # vectors compared with all patterns at a time: 2048 x 256 x 8 float32 are 16 MiB


@cache
def patterns() -> Tensor:
    """Magnitudes doubled, uint8 [256, 8] of 1, 3, 5, by squared norm, then lexicographically."""
    every = [p for p in product((1, 3, 5), repeat=8) if sum(e * e for e in p) <= 48]
    short = sorted(
        (p for p in every if sum(e * e for e in p) <= 40), key=lambda p: (sum(e * e for e in p), p)
    )
    long = sorted(p for p in every if sum(e * e for e in p) == 48 and 5 not in p)
    return torch.tensor((short + long)[:PATTERNS], dtype=torch.uint8)


def odd_signs(doubled: Tensor) -> Tensor:
    """Whether a pattern [..., 8] of doubled magnitudes needs an odd number of negative entries."""
    return (doubled.long().sum(-1) // 2) % 2 == 1


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codewords [..., 8] of ``codes`` (any integer dtype, the low 16 bits count): exact in 16 bits and up."""
    codes = codes.long() & 0xFFFF
    doubled = patterns().to(codes.device)[codes >> 8]
    negative = (codes[..., None] >> torch.arange(1, 8, device=codes.device)) & 1
    last = (negative.sum(-1) + odd_signs(doubled)) % 2
    signs = 1 - 2 * torch.cat([negative, last[..., None]], -1)
    quarters = signs * doubled.long() * 2 + 2 * (codes & 1)[..., None] - 1
    return quarters.to(dtype) / 4


def nearest(x: Tensor) -> Tensor:
    """Codes (int32, 0..65535) of the codewords nearest to vectors ``x`` [..., 8].

    Raises :class:`WrongShape` unless the last axis is 8.
    """
    if x.ndim == 0 or x.shape[-1] != 8:
        raise WrongShape(f"E8P codes vectors of 8, not {tuple(x.shape)}.", hint="Reshape to [..., 8].")
    flat = x.reshape(-1, 8).float()
    codes = [_nearest(part) for part in flat.split(_CHUNK)] or [flat.new_zeros(0, dtype=torch.int32)]
    return torch.cat(codes).view(x.shape[:-1])


def _nearest(x: Tensor) -> Tensor:
    half = patterns().to(x.device).float() / 2
    best_score = x.new_full((len(x),), -torch.inf)
    best = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    for shift in (0, 1):
        y = x - (0.25 if shift else -0.25)
        negative = y < 0
        # |y - s|^2 = |y|^2 - score. Where the signs of y have the wrong parity, one entry must be flipped:
        # the one that costs least.
        wrong = (negative.sum(1) % 2 == 1)[:, None] != odd_signs(patterns().to(x.device))[None]
        products = y.abs()[:, None, :] * half
        least, where = products.min(2)
        score = 2 * products.sum(2) - half.square().sum(1) - 4 * least * wrong
        top, index = score.max(1)
        flip = wrong.gather(1, index[:, None]) & (
            torch.arange(8, device=x.device) == where.gather(1, index[:, None])
        )
        signs = (negative ^ flip)[:, :7].int() << torch.arange(1, 8, dtype=torch.int32, device=x.device)
        code = (index.int() << 8) | signs.sum(1, dtype=torch.int32) | shift
        # |y|^2 differs between the shifts.
        top = top - y.square().sum(1)
        best = torch.where(top > best_score, code, best)
        best_score = torch.maximum(best_score, top)
    return best
