"""Products with 4- and 8-bit codes against float64 on the values the grid stands for."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch
from torch.nn import functional as F

from workbench.quant.compiled import coded_linear, fits
from workbench.quant.grid import WHOLE_ROW, round_to_nearest

GRIDS = ((4, 32), (4, 64), (4, WHOLE_ROW), (4, 16), (8, WHOLE_ROW), (8, 32))
ROWS = (1, 2, 5, 12, 13, 40, 250)


def made_grid(n: int, k: int, bits: int, group: int):
    gen = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=gen) / k**0.5
    weight[n // 2] = 0.0
    return round_to_nearest(weight, bits, group), torch.randn(n, generator=gen)


@pytest.mark.parametrize("bits,group", GRIDS)
@pytest.mark.parametrize("n,k", [(96, 64), (70, 192), (33, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_values_are_multiplied_unrounded(
    compiled_kernels: CDLL, bits: int, group: int, n: int, k: int, biased: bool
) -> None:
    """The one rounding is that of the sum, before the bias."""
    grid, bias = made_grid(n, k, bits, group)
    assert fits(grid)
    made = coded_linear(compiled_kernels, grid, bias if biased else None, "layer", "silu")
    values = grid.values(torch.float64)
    for m in ROWS:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
        exact = x.bfloat16().double() @ values.T
        got = made(x).double() - (bias.double() if biased else 0.0)
        assert ((got - exact).abs() <= exact.abs() * 2**-8 + 2e-6).all()


@pytest.mark.parametrize("bits,group", [(4, 32), (4, 16), (8, WHOLE_ROW)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inner", [64, 45])
def test_gate_and_up_are_two_linears_and_their_product(
    compiled_kernels: CDLL, bits: int, group: int, biased: bool, inner: int
) -> None:
    grid, bias = made_grid(2 * inner, 64, bits, group)
    linear = coded_linear(compiled_kernels, grid, bias if biased else None, "layer", "silu")
    gated = coded_linear(compiled_kernels, grid, bias if biased else None, "mlp.gate_up_proj", "silu")
    assert gated.gated and gated.held[0].nbytes == -(-inner // 32) * 2 * gated.held[0][0].nbytes
    for m in ROWS:
        x = torch.randn(m, 64, generator=torch.Generator().manual_seed(m))
        gate, up = linear(x).chunk(2, -1)
        expected = (F.silu(gate) * up).bfloat16().float()
        got = gated(x).float()
        assert (got - expected).abs().max() <= expected.abs().max() * 2**-8
        assert (got != expected).sum() <= 1 + 0.01 * got.numel()


def test_grids_that_do_not_fit_are_left_to_others() -> None:
    weight = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    assert not fits(round_to_nearest(weight, 4, 16))  # the last group is shorter
    assert not fits(round_to_nearest(weight[:, :15], 4, WHOLE_ROW))  # odd
    assert fits(round_to_nearest(weight, 4, 10))
