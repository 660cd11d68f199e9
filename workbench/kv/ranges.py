"""How large a model's keys and values are: what formats with fixed scales are calibrated with.

Measured once per weight set on calibration text (:mod:`workbench.core.kv_calibration`), on the rows that a
codec is given: keys behind their rotary embedding, values. A static scale never follows the data at run
time, so a token's bytes depend on that token alone; what lies beyond the range saturates.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from workbench.numerics.hadamard import hadamard
from workbench.spec.errors import InvariantError, OptionError


def variant(*, affine: bool, rotate: bool) -> str:
    """Name of a transform of the rows: their mean taken off, then the head rotated."""
    return "+".join([*(["affine"] if affine else []), *(["rotate"] if rotate else [])]) or "raw"


VARIANTS = tuple(variant(affine=a, rotate=r) for a in (False, True) for r in (False, True))


@cache
def rotation(dim: int) -> Tensor:
    """The orthonormal Hadamard matrix of a head, float32 [dim, dim]; it is not symmetric for every order.

    Raises :class:`workbench.spec.errors.OptionError` for a head size that has none.
    """
    matrix: Tensor = hadamard(dim).float() * dim**-0.5
    return matrix


@dataclass(frozen=True)
class KVRanges:
    """``mean`` float32 [2, L, Hkv, D] (keys, values) and ``amax[variant]`` float32 [2, L, Hkv].

    ``origin`` says on what they were measured; ``tokens`` on how many.
    """

    mean: Tensor
    amax: dict[str, Tensor]
    origin: str
    tokens: int

    @property
    def key(self) -> str:
        """A digest of the numbers: part of the key of every codec that uses them (law 4)."""
        digest = hashlib.blake2b(digest_size=8)
        for tensor in (self.mean, *(self.amax[v] for v in VARIANTS)):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of the artefact."""
        return sum(t.numel() * t.element_size() for t in (self.mean, *self.amax.values()))


class RangeRecorder:
    """Collects :class:`KVRanges` in two passes over the same rows: first the means, then the maxima."""

    def __init__(self, layers: int, heads: int, dim: int) -> None:
        self._sum = torch.zeros(2, layers, heads, dim, dtype=torch.float64)
        self._rows = [0] * layers
        self._rotation: Tensor | None = rotation(dim) if _has_rotation(dim) else None
        self._amax = {v: torch.zeros(2, layers, heads, dtype=torch.float32) for v in VARIANTS}
        self._mean: Tensor | None = None

    def add(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Rows ``k``, ``v`` [T, Hkv, D] of one layer."""
        both = torch.stack([k, v]).float().cpu()
        if self._mean is None:
            self._sum[:, layer] += both.double().sum(1)
            self._rows[layer] += both.shape[1]
            return
        for name in VARIANTS:
            rows = both - self._mean[:, layer, None] if "affine" in name else both
            if "rotate" in name:
                if self._rotation is None:
                    continue
                rows = rows @ self._rotation
            seen = self._amax[name][:, layer]
            torch.maximum(seen, rows.abs().amax((1, 3)), out=seen)

    def means_done(self) -> None:
        """The first pass is over."""
        rows = torch.tensor(self._rows, dtype=torch.float64).clamp(min=1)
        self._mean = (self._sum / rows[None, :, None, None]).float()

    def ranges(self, origin: str) -> KVRanges:
        """What was found, after the second pass."""
        if self._mean is None:
            raise InvariantError("Ranges are asked for before the second pass.")
        return KVRanges(self._mean, self._amax, origin, max(self._rows))


def _has_rotation(dim: int) -> bool:
    try:
        rotation(dim)
    except OptionError:
        return False
    return True
