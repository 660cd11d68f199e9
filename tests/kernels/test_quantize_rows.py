"""Activations to eight bits: bit-equal to the torch form, zeros, non-finite rows, smoothing, refusals."""

from __future__ import annotations

import pytest
import torch

from workbench.kernels.linear.quantize_rows import cost, quantize_groups, quantize_rows, reference
from workbench.spec.errors import UnsupportedInput

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [(1, 8), (3, 576), (5, 1000)])
def test_int8_equals_the_reference(
    m: int, k: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    x = (torch.randn(m, k, generator=generator) * 10).to(device, dtype)
    codes, scales = quantize_rows(x)
    want_codes, want_scales = reference(x)
    assert torch.equal(scales, want_scales) and torch.equal(codes, want_codes)
    assert (codes.abs().amax(1) == 127).all()
    error = (codes.double() * scales.double()[:, None] - x.double()).abs()
    assert (error <= scales.double()[:, None] * (0.5 + 1e-4)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "k"), [(1, 8), (3, 576), (2, 1024)])
def test_e4m3_equals_the_reference(
    m: int, k: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> None:
    """576 inputs are 4.5 groups: the last scale belongs to a short group."""
    x = (torch.randn(m, k, generator=generator) * 10).to(device, dtype)
    codes, scales = quantize_groups(x)
    want_codes, want_scales = reference(x, groups=True)
    assert codes.dtype == torch.float8_e4m3fn and scales.shape == (-(-k // 128), m)
    assert torch.equal(scales, want_scales)
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))


def test_smoothing_factors_are_applied_first(device: str, generator: torch.Generator) -> None:
    x = torch.randn(4, 96, generator=generator).to(device, torch.bfloat16)
    factors = (torch.rand(96, generator=generator) + 0.5).to(device)
    codes, scales = quantize_rows(x, factors)
    want_codes, want_scales = reference(x, factors)
    assert torch.equal(codes, want_codes) and torch.equal(scales, want_scales)
    assert not torch.equal(codes, quantize_rows(x)[0])


def test_qnt_05_rows_of_zeros_and_tiny_rows_are_zero_and_leave_others_alone(device: str) -> None:
    x = torch.zeros(3, 256, device=device)
    x[1] = torch.linspace(-3, 5, 256)
    x[2] = 1e-39
    codes, scales = quantize_rows(x)
    assert not codes[0].any() and scales[0] == 0 and not codes[2].any()
    assert torch.equal(codes[1:2], quantize_rows(x[1:2])[0])
    codes, scales = quantize_groups(x)
    assert not codes[0].float().any() and (scales[:, 0] == 0).all() and codes.float().isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_marks_its_own_scale_only(bad: float, device: str) -> None:
    x = torch.ones(3, 256, device=device)
    x[1, 200] = bad
    assert quantize_rows(x)[1].isnan().tolist() == [False, True, False]
    assert quantize_groups(x)[1].isnan().tolist() == [[False] * 3, [False, True, False]]


def test_rows_may_lie_apart(device: str, generator: torch.Generator) -> None:
    wide = torch.randn(4, 300, generator=generator).to(device)
    assert torch.equal(quantize_rows(wide[:, 50:178])[0], quantize_rows(wide[:, 50:178].contiguous())[0])
    for refused in (wide.t(), wide[:, ::2], wide.double(), torch.zeros(1, 40000, device=device), wide[0]):
        with pytest.raises(UnsupportedInput):
            quantize_rows(refused)
    with pytest.raises(UnsupportedInput, match="factors"):
        quantize_rows(wide, torch.ones(299, device=device))


def test_no_rows(device: str) -> None:
    codes, scales = quantize_rows(torch.zeros(0, 64, device=device))
    assert codes.shape == (0, 64) and scales.shape == (0,)
    assert cost(M=2, K=64).bytes == 2 * 64 * 3 + 8
