"""What CurDKV's projection costs: it blurs squared norms exactly as a chi-square law of its rank does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from workbench.kv.curdkv import cur_scores
from workbench.kv.selection.leverage import projected_norms, projection, row_norms
from workbench.kv.selection.topk import top_slots

HEADS, SLOTS, DIM = 16, 1024, 64


def rows(seed: int) -> Tensor:
    """Float64 [H, S, D] in random directions, of lengths that differ as those of real values do."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(HEADS, SLOTS, DIM, generator=g, dtype=torch.float64)
    lengths = (0.2 * torch.randn(HEADS, SLOTS, 1, generator=g, dtype=torch.float64)).exp()
    return x / x.norm(dim=-1, keepdim=True) * lengths


def shared(a: np.ndarray, b: np.ndarray, keep: int) -> float:
    """The share of the ``keep`` best of each row of ``a`` [H, S] that are among those of ``b``."""
    best = [np.argsort(-x, axis=1, kind="stable")[:, :keep] for x in (a, b)]
    return float(np.mean([len(np.intersect1d(p, q)) / keep for p, q in zip(*best, strict=True)]))


@pytest.mark.parametrize("rank", [8, 20, 128])
@pytest.mark.parametrize("share", [0.25, 0.5])
def test_projected_selection_agrees_with_exact_norms_as_often_as_chi_square_noise_does(
    rank: int, share: float
) -> None:
    keys, values, keep = rows(1), rows(2), int(share * SLOTS)
    matrices = torch.stack([projection(DIM, rank, 0, layer) for layer in range(HEADS)]).double()

    def projected(x: Tensor) -> Tensor:
        return torch.cat([projected_norms(x[h : h + 1], matrices[h]) for h in range(HEADS)])

    kept = [
        top_slots(cur_scores(keys, values, norms, "product"), keep, 0, 0) for norms in (row_norms, projected)
    ]
    got = np.mean([len(np.intersect1d(a, b)) / keep for a, b in zip(*kept, strict=True)])
    exact = (keys.square().sum(-1) * values.square().sum(-1)).numpy()
    draw = np.random.default_rng(0)
    noisy = exact * (draw.chisquare(rank, exact.shape) / rank) * (draw.chisquare(rank, exact.shape) / rank)
    assert got == pytest.approx(shared(exact, noisy, keep), abs=0.03)
