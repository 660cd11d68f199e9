"""How much each group of components loses in each format, measured on calibration rows.

The basis is orthonormal, so squared error of coefficients is squared error of keys or values (arXiv
2511.01815, section 3.2). Groups are measured by really quantizing them. A group may begin anywhere; large
ones are measured at every sixteenth of their size and interpolated between, since moving a group of 1,024 by
a few components hardly changes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kv.kvtc.formats import KINDS, SIZES, dequantize, quantize


@dataclass(frozen=True)
class Distortion:
    """Mean squared error per token, summed over a group.

    ``energy`` float64 [r]: of dropping a component. ``error`` float64 [sizes, kinds, r]: of storing
    ``sizes[i]`` components from each start on in a format of ``KINDS``; infinite where they pass the end.
    """

    sizes: tuple[int, ...]
    energy: Tensor
    error: Tensor


def measure(coefficients: Tensor, sizes: Sequence[int] = SIZES) -> Distortion:
    """Measure on coefficients float32 [N, r] of calibration rows."""
    rank = coefficients.shape[1]
    error = torch.full((len(sizes), len(KINDS), rank), torch.inf, dtype=torch.float64)
    for i, size in enumerate(sizes):
        if size > rank:
            continue
        last = rank - size
        starts = sorted({*range(0, last, max(size // 16, 1)), last})
        found = torch.stack([_errors(coefficients, start, size) for start in starts], 1)
        error[i, :, : last + 1] = _between(torch.tensor(starts), found, last)
    return Distortion(tuple(sizes), coefficients.double().square().mean(0), error)


def _errors(coefficients: Tensor, start: int, size: int) -> Tensor:
    """float64 [kinds]: error of one group."""
    x = coefficients[:, start : start + size].contiguous()
    out = [(dequantize(*quantize(x, kind), kind) - x).double().square().sum() / len(x) for kind in KINDS]
    return torch.stack(out)


def _between(starts: Tensor, found: Tensor, last: int) -> Tensor:
    """Values at every start 0..last, linear between those found [kinds, n]."""
    if len(starts) == 1:
        return found
    every = torch.arange(last + 1)
    right = torch.searchsorted(starts, every).clamp(min=1)
    a, b = starts[right - 1], starts[right]
    t = (every - a) / (b - a)
    return found[:, right - 1] * (1 - t) + found[:, right] * t
