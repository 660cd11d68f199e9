"""W8A8 against exact integers: every tile and split gives the same bits; extremes, ragged sizes, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workbench.kernels.layouts.w8 import W8, quantize_w8
from workbench.kernels.linear.quantize_rows import quantize_rows
from workbench.kernels.linear.w8a8 import cost, reference, w8a8
from workbench.spec.errors import UnsupportedInput, WrongShape


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, or a large integer: an element that no program writes is seen."""
    empty = torch.empty

    def filled(*a: object, **k: object) -> Tensor:
        tensor = empty(*a, **k)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", filled)


def operands(m: int, n: int, k: int, generator: torch.Generator, device: str) -> tuple[Tensor, Tensor, W8]:
    codes = torch.randint(-127, 128, (m, k), generator=generator, dtype=torch.int8).to(device)
    rows = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8).to(device)
    scales = (torch.rand(m, generator=generator) / 100).to(device)
    return codes, scales, W8(rows, (torch.rand(n, generator=generator) / 100).to(device))


@pytest.mark.parametrize("m", [1, 16, 17, 40, 130])
@pytest.mark.parametrize(("n", "k"), [(64, 576), (200, 208), (8, 16)])
def test_results_are_rounded_once(m: int, n: int, k: int, device: str, generator: torch.Generator) -> None:
    """Within one rounding of two float32 products and one cast of the exact value."""
    codes, scales, weight = operands(m, n, k, generator, device)
    exact = reference(codes, scales, weight)
    y = w8a8(codes, scales, weight)
    assert y.shape == (m, n) and y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= exact.abs() * (2**-8 + 2**-21)).all()


@pytest.mark.parametrize("m", [3, 130])
def test_splits_give_the_same_bits(m: int, device: str, generator: torch.Generator) -> None:
    """9 tiles of K in 1, 2 and 9 parts, in the tile of few and of many tokens."""
    codes, scales, weight = operands(m, 72, 1152, generator, device)
    whole = w8a8(codes, scales, weight, split=1)
    for split in (2, 9):
        assert torch.equal(w8a8(codes, scales, weight, split=split), whole)


def test_the_tile_of_few_tokens_gives_the_bits_of_the_other(device: str, generator: torch.Generator) -> None:
    codes, scales, weight = operands(40, 64, 256, generator, device)
    assert torch.equal(w8a8(codes[:7], scales[:7], weight), w8a8(codes, scales, weight)[:7])


def test_extreme_codes_do_not_overflow(device: str) -> None:
    codes = torch.full((1, 4096), 127, dtype=torch.int8, device=device)
    weight = W8(torch.full((8, 4096), -127, dtype=torch.int8, device=device), torch.ones(8, device=device))
    y = w8a8(codes, torch.ones(1, device=device), weight, split=1)
    assert (y == torch.tensor(-127.0 * 127 * 4096).bfloat16()).all()


def test_quantized_end_to_end_is_near_the_float_product(device: str, generator: torch.Generator) -> None:
    """Smoothing moves an outlier channel into the weights, as SmoothQuant does, and lowers the error."""
    x = torch.randn(8, 256, generator=generator).to(device)
    x[:, 7] *= 60
    w = torch.randn(64, 256, generator=generator).to(device) / 16
    exact = x.double() @ w.double().t()

    def error(smooth: Tensor | None) -> float:
        scaled = w if smooth is None else w * smooth
        y = w8a8(*quantize_rows(x, None if smooth is None else 1 / smooth), quantize_w8(scaled))
        return float((y.double() - exact).norm() / exact.norm())

    smooth = (x.abs().amax(0) ** 0.5 / w.abs().amax(0) ** 0.5).clamp(min=1e-5)
    assert error(smooth) < 0.02 and error(smooth) < 0.6 * error(None)


def test_float16_results(device: str, generator: torch.Generator) -> None:
    codes, scales, weight = operands(2, 16, 64, generator, device)
    y = w8a8(codes, scales, weight, dtype=torch.float16)
    exact = reference(codes, scales, weight)
    assert ((y.double() - exact).abs() <= exact.abs() * (2**-11 + 2**-21) + 2**-25).all()


def test_refusals(device: str, generator: torch.Generator) -> None:
    codes, scales, weight = operands(2, 16, 64, generator, device)
    for bad in (codes[:, :48], codes.float(), codes.repeat(1, 2)[:, 1:65], codes.t()):
        with pytest.raises(UnsupportedInput):
            w8a8(bad, scales, weight)
    with pytest.raises(UnsupportedInput, match="scales"):
        w8a8(codes, scales[:1], weight)
    with pytest.raises(UnsupportedInput, match="several devices"):
        w8a8(codes, scales.to("meta"), weight)
    with pytest.raises(UnsupportedInput, match="bf16 or fp16"):
        w8a8(codes, scales, weight, dtype=torch.float64)
    with pytest.raises(UnsupportedInput, match="131072"):
        w8a8(
            torch.zeros(1, 131088, dtype=torch.int8, device=device), scales[:1],
            W8(torch.zeros(8, 131088, dtype=torch.int8, device=device), torch.ones(8, device=device)),
        )  # fmt: skip
    with pytest.raises(WrongShape):
        W8(weight.codes, weight.scales[:3])
    assert w8a8(codes[:0], scales[:0], weight).shape == (0, 16)
    assert cost(M=1, N=8, K=16).flops == 256
