"""The transform against the dense matrix in float64: orders, blocks, signs, inverses, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.kernels.linear.hadamard import cost, hadamard, reference, shape
from workbench.numerics import hadamard as numbers
from workbench.spec.errors import OptionError, UnsupportedInput


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN: an element that no program writes is seen."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def check(y: Tensor, x: Tensor, block: int = 0, *signs: Tensor | None, transposed: bool = False) -> None:
    """Finite, and at most twice as far from float64 as the dense product in the same dtype."""
    exact = reference(x, block, *signs, transposed=transposed)
    plain = reference(x, block, *signs, transposed=transposed, dtype=x.dtype).double()
    assert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all()
    error, baseline = (y.double() - exact).abs().max(), (plain - exact).abs().max()
    assert error <= 2 * baseline + 1e-6 * exact.abs().max(), (float(error), float(baseline))


@pytest.mark.parametrize("n", [1, 2, 4, 12, 20, 28, 36, 44, 60, 64, 96, 576, 1536])
def test_matrices_are_signs_with_orthogonal_rows(n: int) -> None:
    h = numbers.hadamard(n).double()
    assert (h.abs() == 1).all()
    assert torch.equal(h @ h.t(), n * torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("n", [0, 3, 9, 18, 92])
def test_orders_without_a_construction_are_refused(n: int) -> None:
    with pytest.raises(OptionError, match="order"):
        numbers.factors(n)


@pytest.mark.parametrize("n", [1, 2, 16, 20, 64, 96, 128, 192, 256, 576, 1536, 2048])
def test_equals_the_dense_matrix(n: int, device: str, generator: torch.Generator) -> None:
    x = torch.randn(3, n, generator=generator).to(device, torch.bfloat16)
    check(hadamard(x), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("n", [64, 960])
def test_wider_inputs_keep_their_bits(
    n: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    x = torch.randn(2, n, generator=generator).to(device, dtype)
    check(hadamard(x), x)
    if dtype == torch.float32:
        assert (hadamard(x).double() - reference(x)).abs().max() < 3e-6


def test_signs_of_both_sides_and_the_inverse(device: str, generator: torch.Generator) -> None:
    """The transposed transform with exchanged signs undoes it: the transform is orthonormal."""
    x = torch.randn(4, 192, generator=generator).to(device)
    left, right = (numbers.random_signs(192, seed).to(device) for seed in (1, 2))
    y = hadamard(x, 0, left, right)
    check(y, x, 0, left, right)
    back = hadamard(y, 0, right, left, transposed=True)
    assert torch.allclose(back, x, atol=2e-6)
    assert torch.allclose(y.norm(dim=1), x.norm(dim=1), rtol=1e-6)
    assert torch.equal(numbers.random_signs(192, 1), numbers.random_signs(192, 1))


@pytest.mark.parametrize(("rows", "k", "block"), [(3, 576, 64), (70, 60, 20), (2, 1152, 576), (1, 384, 192)])
def test_blocks_of_a_row_have_their_own_signs(
    rows: int, k: int, block: int, device: str, generator: torch.Generator
) -> None:
    """Nine blocks of 64, 210 blocks of 20 in tiles of 64, and two blocks of two factors."""
    x = torch.randn(rows, k, generator=generator).to(device, torch.bfloat16)
    signs = numbers.random_signs(k, 7).to(device)
    check(hadamard(x, block, signs, signs), x, block, signs, signs)


def test_it_spreads_an_outlier(device: str) -> None:
    x = torch.zeros(1, 576, device=device)
    x[0, 100] = 24.0
    assert torch.allclose(hadamard(x).abs(), torch.ones(1, 576, device=device), atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours(device: str, generator: torch.Generator) -> None:
    for n in (64, 256):
        x = torch.randn(5, n, generator=generator).to(device, torch.bfloat16)
        clean = hadamard(x)
        x[:2], x[3:] = float("nan"), float("inf")
        assert torch.equal(hadamard(x)[2], clean[2])


def test_rows_may_lie_apart_and_the_rest_is_refused(device: str, generator: torch.Generator) -> None:
    wide = torch.randn(4, 200, generator=generator).to(device)
    assert torch.equal(hadamard(wide[:, 3:67]), hadamard(wide[:, 3:67].contiguous()))
    for bad in (wide[:, ::2][:, :64], wide.double(), wide[0]):
        with pytest.raises(UnsupportedInput):
            hadamard(bad)
    with pytest.raises(UnsupportedInput, match="divide"):
        hadamard(wide, 64)
    with pytest.raises(UnsupportedInput, match="signs_in"):
        hadamard(wide[:, :64], 0, torch.ones(32, device=device))
    with pytest.raises(UnsupportedInput, match="128 x 128"):
        shape(32768)
    assert hadamard(wide[:0, :64]).shape == (0, 64)


def test_shapes_hold_a_paley_factor_on_the_left() -> None:
    assert [shape(n) for n in (96, 576, 4096, 14336)] == [(1, 96), (36, 16), (64, 64), (112, 128)]
    assert cost(M=1, K=128).flops == 2 * 128 * 128
