"""Round-to-nearest weights on the four-bit kernel: the values of the grid, and bytes of what is held."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels import dispatch, target
from workbench.quant.dequantized import dequantizing
from workbench.quant.grid import WHOLE_ROW, round_to_nearest
from workbench.quant.kernel import kernel_linear


@pytest.mark.parametrize("group", [32, 128, WHOLE_ROW])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_the_kernel_multiplies_with_the_values_of_the_grid(
    rows: int, group: int, device: str, generator: torch.Generator
) -> None:
    weight = torch.randn(48, 256, generator=generator).to(device)
    bias = torch.randn(48, generator=generator).to(device)
    x = torch.randn(rows, 256, generator=generator).to(device)
    grid = round_to_nearest(weight, 4, group)
    linear = kernel_linear(grid, bias, pinned=False)
    assert linear is not None
    exact = x.bfloat16().double() @ grid.values(torch.float64).T + bias.double()
    plain = dequantizing(grid, bias, pinned=False)
    # Both keep the values exact and round the sum once; values rounded to bfloat16 would err more.
    error, allowed = ((y.double() - exact).norm() for y in (linear(x), plain(x)))
    assert error <= 1.2 * allowed
    assert linear.kernel.startswith("w4a16 ")


def test_bytes_are_those_of_codes_and_parameters(device: str, generator: torch.Generator) -> None:
    grid = round_to_nearest(torch.randn(64, 256, generator=generator).to(device), 4, 64)
    linear = kernel_linear(grid, None, pinned=False)
    assert linear is not None
    assert sum(t.untyped_storage().nbytes() for t in linear.held) == 64 * 128 + 2 * 2 * 64 * 4


def test_what_the_kernel_cannot_hold_is_left_to_others(device: str) -> None:
    def offered(n: int, k: int, group: int, bits: int = 4, pinned: bool = False) -> bool:
        grid = round_to_nearest(torch.ones(n, k, device=device), bits, group)
        return kernel_linear(grid, None, pinned=pinned) is not None

    assert offered(8, 64, 32)
    assert not offered(7, 64, 32)
    assert not offered(8, 60, 30)
    assert not offered(8, 64, 64, bits=8)
    assert not offered(8, 64, 32, pinned=True)


def test_no_kernel_without_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not dispatch.choose("w4a16", target.probe("cpu")).runs
    assert kernel_linear(round_to_nearest(torch.ones(8, 64), 4, 32), None, pinned=False) is None
