"""Values expected from keys of the same token: a linear map between coefficients, for the range coder.

Keys and values are linear in the same hidden state, so separate bases leave much of one in the other. The
paper codes them apart; so do we, but once the keys of a token are decoded, the range coder expects its values
where this map puts them. It changes no code and no reconstruction, only how many bits codes take.

Both sides must compute the same expectation on every machine: weights are 16-bit integers, coefficients are
rounded to fixed point, and their products and sums stay below 2^53, where float64 is exact in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kv.kvtc.basis import Basis

INPUTS = 512  # leading key components that values are expected from
_POINT = 12  # binary digits of a coefficient behind the point, in units of its scale
_WEIGHT = 13  # the same of a weight; 4 is the largest
_LIMIT = 2.0**24
_RIDGE = 1e-3


@dataclass(frozen=True)
class Cross:
    """``weights`` int16 [rk, rv]; ``k_scale`` int16 [rk] and ``v_scale`` int16 [rv], exponents of two."""

    weights: Tensor
    k_scale: Tensor
    v_scale: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the map."""
        return self.weights.nbytes + self.k_scale.nbytes + self.v_scale.nbytes

    def cut(self, k_rank: int, v_rank: int) -> Cross:
        """The map between the first components only; expectations follow as if the other keys were 0."""
        k, v = slice(k_rank), slice(v_rank)
        return Cross(self.weights[k, v].clone(), self.k_scale[k].clone(), self.v_scale[v].clone())

    def expect(self, keys: Tensor) -> Tensor:
        """Expected value coefficients float64 [T, rv] of decoded key coefficients float64 [T, >= rk]."""
        used = torch.ldexp(keys[:, : len(self.k_scale)], _POINT - self.k_scale)
        fixed = used.round().clamp(-_LIMIT, _LIMIT)
        return torch.ldexp(fixed @ self.weights.double(), self.v_scale - (_POINT + _WEIGHT))


class CrossMoments:
    """Products of coefficients of keys and values, for least squares."""

    def __init__(self, k: Basis, v: Basis) -> None:
        self._k, self._v = k, v
        self.inputs = min(INPUTS, k.rank)
        self._kk = torch.zeros(self.inputs, self.inputs, dtype=torch.float64)
        self._kv = torch.zeros(self.inputs, v.rank, dtype=torch.float64)

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Joint rows float32 [T, p] of the same tokens."""
        leading = self._k.components[: self.inputs].float()
        k = ((keys - self._k.mean) @ leading.T).double()
        self._kk.addmm_(k.T, k)
        self._kv.addmm_(k.T, self._v.project(values).double())

    def cross(self) -> Cross:
        """Ridge regression, in units of each component's deviation rounded to a power of two."""
        ridge = _RIDGE * self._kk.diagonal().mean().clamp(min=1e-30)
        weights = torch.linalg.solve(self._kk + ridge * torch.eye(self.inputs, dtype=torch.float64), self._kv)
        k_scale = _exponent(self._k.variance[: self.inputs])
        v_scale = _exponent(self._v.variance)
        fixed = torch.ldexp(weights, k_scale[:, None] - v_scale + _WEIGHT).round()
        return Cross(fixed.clamp(-32767, 32767).to(torch.int16).contiguous(), k_scale, v_scale)


def _exponent(variance: Tensor) -> Tensor:
    """int16: the deviation lies between half of 2^this and 2^this."""
    return torch.frexp(variance.clamp(min=1e-30).sqrt())[1].to(torch.int16)
