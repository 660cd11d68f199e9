"""Mean and principal components of joint rows, from moments that stream in.

arXiv 2511.01815, section 3.1. Sums are float64 whatever arrives, so the order of documents does not matter
and no row is kept. The first tokens of a sequence (attention sinks) must be left out by the caller: a handful
of rows hundreds of times larger would own the leading components.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.spec.errors import InvariantError

_TILE = 1024


@dataclass(frozen=True)
class Basis:
    """``mean`` float32 [p]; ``components`` float16 [r, p], orthonormal up to rounding, in order of variance.

    ``variance`` float64 [r] is each component's on the calibration rows, ``total`` that of all p.
    """

    mean: Tensor
    components: Tensor
    variance: Tensor
    total: float

    @property
    def rank(self) -> int:
        """Components kept (r)."""
        return len(self.components)

    def project(self, rows: Tensor) -> Tensor:
        """Coefficients float32 [T, r] of joint rows [T, p]."""
        return (rows - self.mean) @ self.components.float().T

    def rank_for(self, share: float) -> int:
        """Components that hold ``share`` of the variance, or r + 1 when those kept do not."""
        held = torch.cumsum(self.variance, 0) / self.total
        return int((held < share).sum()) + 1


class Moments:
    """Sums of rows [T, p] and of their products (the upper triangle of [p, p]), both float64."""

    def __init__(self, features: int) -> None:
        self.rows = 0
        self._shift: Tensor | None = None
        self._sum = torch.zeros(features, dtype=torch.float64)
        self._products = torch.zeros(features, features, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        """Add rows [T, p]; taken relative to the first rows' mean, so that nothing large cancels later."""
        x = rows.double()
        if self._shift is None:
            self._shift = x.mean(0)
        x = x - self._shift
        self._sum += x.sum(0)
        for at in range(0, len(self._sum), _TILE):  # the upper triangle is enough
            part = slice(at, at + _TILE)
            self._products[part, at:].addmm_(x[:, part].T, x[:, at:])
        self.rows += len(x)

    def basis(self, rank: int, block: int | None = None) -> Basis:
        """The leading ``rank`` components.

        ``block``: only correlations inside blocks of so many features are used (a head, a layer): the
        ablation that shows what joining layers and heads is worth. Raises :class:`InvariantError` before
        any row was added.
        """
        if self._shift is None:
            raise InvariantError("A basis was asked for before any row was seen.")
        mean = self._sum / self.rows
        features = len(mean)
        block = block or features
        values = torch.zeros(features, dtype=torch.float64)
        vectors = torch.zeros(features, features, dtype=torch.float32) if block < features else None
        for at in range(0, features, block):
            part = slice(at, at + block)
            covariance = self._products[part, part] / self.rows - torch.outer(mean[part], mean[part])
            values[part], own = torch.linalg.eigh(covariance, UPLO="U")
            if vectors is None:
                vectors = own
            else:
                vectors[part, part] = own.float()
        order = values.argsort(descending=True, stable=True)[:rank]
        if vectors is None:
            raise InvariantError("Rows without features have no basis.")
        return Basis(
            mean=(mean + self._shift).float(),
            components=vectors[:, order].T.half().contiguous(),
            variance=values[order].clamp(min=0),
            total=float(values.clamp(min=0).sum()),
        )
