"""Products and layers of the compiled kernels against float64, for every number of rows and odd sizes."""

from __future__ import annotations

from ctypes import CDLL

import pytest
import torch
from torch.nn import functional as F

from workbench.models.compiled import gated_linear, linear, panels_of, taking_turns
from workbench.models.plain import sixteen_bit

ROWS = (1, 2, 3, 5, 8, 11, 12, 13, 24, 37, 250)
SIZES = ((96, 48), (70, 35), (33, 7), (1, 1), (320, 576))
ACTIVATION = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


def drawn(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(n * k)
    return torch.randn(n, k, generator=gen) / k**0.5, torch.randn(n, generator=gen)


@pytest.mark.parametrize("n,k", SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_exact_up_to_the_order_of_sums(
    compiled_kernels: CDLL, n: int, k: int, biased: bool
) -> None:
    """Inputs are rounded to bfloat16; the sums are float32 or, for layers, rounded once more."""
    weight, bias = drawn(n, k)
    made = linear(compiled_kernels, weight, bias if biased else None, rounded=False)
    layers = linear(compiled_kernels, weight, bias if biased else None, rounded=True)
    for m in ROWS:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m))
        expected = x.bfloat16().double() @ sixteen_bit(weight).double().T
        if biased:
            expected += bias.bfloat16().double()
        got = made(x)
        assert got.dtype is torch.float32
        assert (got - expected).abs().max() < 1e-5 * (1 + expected.abs().max())
        assert torch.equal(layers(x), got.bfloat16())
        assert torch.equal(made(x.bfloat16()), got)


@pytest.mark.parametrize("activation", ACTIVATION)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("inner,k", [(64, 48), (70, 35), (33, 7)])
def test_gate_and_up_round_where_the_torch_path_does(
    compiled_kernels: CDLL, activation: str, biased: bool, inner: int, k: int
) -> None:
    weight, bias = drawn(2 * inner, k)
    made = gated_linear(compiled_kernels, weight, bias if biased else None, activation)
    for m in ROWS:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)) * 2
        sums = x.bfloat16().double() @ sixteen_bit(weight).double().T
        if biased:
            sums += bias.bfloat16().double()
        gate, up = sums.chunk(2, -1)
        exact = ACTIVATION[activation](gate) * up
        got = made(x)
        assert got.dtype is torch.bfloat16 and got.shape == (m, inner)
        # Two roundings to eight bits, and sums that may fall on the other side of one.
        assert ((got.double() - exact).abs() <= exact.abs() * 2**-7 + 1e-6).all()
        rounded = (ACTIVATION[activation](gate).bfloat16().double() * up).bfloat16()
        assert (got != rounded).sum() <= 1 + 0.02 * got.numel()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38, -3e38, 1e-42])
def test_extreme_inputs_give_what_float32_gives(compiled_kernels: CDLL, value: float) -> None:
    weight, _ = drawn(64, 32)
    x = torch.ones(3, 32)
    x[1, 5] = value
    got = gated_linear(compiled_kernels, weight, None, "silu")(x)
    assert got[0].isfinite().all() and got[2].isfinite().all()
    sums = x.bfloat16().float() @ sixteen_bit(weight).float().T
    gate, up = sums.chunk(2, -1)
    assert torch.equal(got[1].isnan(), (F.silu(gate) * up)[1].isnan())


def test_a_row_is_summed_alike_among_others(compiled_kernels: CDLL) -> None:
    """From two rows on; a single row has more sums under way at once."""
    weight, _ = drawn(96, 200)
    made = linear(compiled_kernels, weight, None, rounded=False)
    x = torch.randn(60, 200, generator=torch.Generator().manual_seed(0))
    whole = made(x)
    for m in (2, 3, 7, 12, 13, 25):
        assert torch.equal(made(x[:m]), whole[:m])
    assert (made(x[:1]) - whole[:1]).abs().max() < 1e-5


def test_panels_hold_every_weight_once() -> None:
    weight = torch.arange(70 * 5).view(70, 5).bfloat16()
    panels = panels_of(weight).view(torch.bfloat16).view(3, 3, 32, 2)
    for n in (0, 31, 32, 69):
        assert panels[n // 32, :, n % 32].flatten()[:5].tolist() == weight[n].tolist()
    assert panels[2, :, 6:].abs().sum() == 0 and panels[:, 2, :, 1].abs().sum() == 0
    turns = taking_turns(weight)
    assert turns.shape == (128, 5)
    assert torch.equal(turns[:32], weight[:32]) and torch.equal(turns[32:64], weight[35:67])
    assert torch.equal(turns[64:67], weight[32:35]) and torch.equal(turns[96:99], weight[67:])
