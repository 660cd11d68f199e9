"""Which rows of a matrix carry it: row norms, projected row norms, and true leverage scores.

The leverage of row j of a matrix A is ``||U_j||^2`` for an orthonormal basis U of its columns (Drineas
et al., arXiv 1109.3843): at most 1, summing to the rank. CurDKV's approximation is the squared norm of a
randomly projected row, which estimates ``||A_j||^2``, not leverage; both are here under their own names.
Nothing is larger than tokens by head size: no matrix of tokens by tokens is formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.kv.selection.exact import widened


def row_norms(x: Tensor) -> Tensor:
    """Squared norms [H, S] of rows ``x`` [H, S, D]."""
    out: Tensor = widened(x).square().sum(-1)
    return out


def projection(dim: int, rank: int, seed: int, layer: int) -> Tensor:
    """Gaussian float32 [dim, rank] with variance 1/rank, so that norms are kept on average."""
    draw = torch.Generator().manual_seed((seed << 20) + layer)
    scale: float = rank**-0.5
    return torch.randn(dim, rank, generator=draw, dtype=torch.float32) * scale


def projected_norms(x: Tensor, matrix: Tensor) -> Tensor:
    """Squared norms [H, S] of ``x`` [H, S, D] times ``matrix`` [D, r]."""
    wide = widened(x)
    out: Tensor = (wide @ matrix.to(wide)).square().sum(-1)
    return out


def leverage_scores(x: Tensor) -> Tensor:
    """``||U_j||^2`` [H, S] of rows ``x`` [H, S, D], by thin SVD in float64; zero for a zero matrix.

    Directions below rounding (S or D times machine epsilon of the largest singular value) are no part of
    the basis, else noise would carry as much as the signal. Values that are not finite give NaN.
    """
    wide = x.double()
    if not bool(torch.isfinite(wide).all()):
        return torch.full(x.shape[:-1], torch.nan, dtype=torch.float64, device=x.device)
    u, s, _ = torch.linalg.svd(wide, full_matrices=False)
    precision = torch.finfo(x.dtype if x.dtype.is_floating_point else torch.float64).eps
    real = s > s[..., :1] * max(wide.shape[-2:]) * precision
    out: Tensor = (u.square() * real[..., None, :]).sum(-1)
    return out


def normalised(scores: Tensor, window: int = 0) -> Tensor:
    """Scores [H, S], non-negative, divided by their sum: of all, or of each ``window`` of slots.

    Where all are zero they become equal.
    """
    heads, slots = scores.shape
    size = window or max(slots, 1)
    parts = torch.nn.functional.pad(scores, (0, -slots % size)).view(heads, -1, size)
    total = parts.sum(-1, keepdim=True)
    even = torch.full_like(parts, 1 / size)
    shares = torch.where(total == 0, even, parts / total)  # NaN stays NaN
    return shares.view(heads, -1)[:, :slots]
