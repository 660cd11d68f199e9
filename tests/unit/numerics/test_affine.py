"""Directed rounding of stored parameters, and exact zeros."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.numerics.affine import (
    affine_codes,
    affine_parameters,
    affine_values,
    round_away16,
    symmetric_scale,
)


@pytest.mark.parametrize("magnitude", [1e-9, 1e-6, 1e-3, 1.0, 300.0, 6e4])
def test_rounding_is_directed_and_tight(magnitude: float, seeded: None) -> None:
    x = torch.randn(4096).clamp(-1, 1) * magnitude
    up, down = round_away16(x, math.inf), round_away16(x, -math.inf)
    assert (up.float() >= x).all() and (down.float() <= x).all()
    gap = up.float() - down.float()
    assert (gap <= x.abs() * 2**-10 + 2**-24).all(), "at most one float16 step apart"


def test_rounding_saturates_instead_of_reaching_infinity() -> None:
    assert round_away16(torch.tensor([1e9, 65504.0]), math.inf).tolist() == [65504.0, 65504.0]
    assert round_away16(torch.tensor([-1e9]), -math.inf).tolist() == [-65504.0]


@pytest.mark.parametrize("magnitude", [0.0, 1e-9, 1e-5, 1e-3, 1.0, 1e4])
def test_symmetric_scale_covers_the_row(magnitude: float, seeded: None) -> None:
    amax = torch.rand(2048) * magnitude
    scale = symmetric_scale(amax, 127.0).float()
    assert (scale > 0).all() and (127.0 * scale >= amax).all()
    assert (scale <= amax / 127 * (1 + 1.5 * 2**-10) + 1.5 * 2**-24).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("offset", [0.0, 100.0, -7.0])
def test_error_is_at_most_half_a_stored_step(bits: int, offset: float, seeded: None) -> None:
    x = torch.randn(64, 32) + offset
    low, step = affine_parameters(x.amin(1, keepdim=True), x.amax(1, keepdim=True), bits)
    back = affine_values(affine_codes(x, low, step, bits), low, step)
    slack = 2**-22 * x.abs()  # float32 arithmetic
    assert ((back - x).abs() <= step.float() / 2 + slack).all()


def test_zero_groups_are_exact_and_constant_groups_are_close() -> None:
    x = torch.tensor([[0.0] * 4, [3.3] * 4, [-2e-8] * 4])
    low, step = affine_parameters(x.amin(1, keepdim=True), x.amax(1, keepdim=True), 4)
    back = affine_values(affine_codes(x, low, step, 4), low, step)
    assert back[0].tolist() == [0.0] * 4
    assert torch.allclose(back[1], x[1], atol=1e-4) and torch.allclose(back[2], x[2], atol=1e-7)
