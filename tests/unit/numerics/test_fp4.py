"""E2M1 and E8M0: every code, every tie, saturation, and the scale of a block."""

from __future__ import annotations

import math

import torch

from workbench.numerics import e2m1, e8m0

MIDPOINTS = {0.25: 0.0, 0.75: 1.0, 1.25: 1.0, 1.75: 2.0, 2.5: 2.0, 3.5: 4.0, 5.0: 4.0}


def test_all_16_codes_survive_a_round_trip() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = e2m1.from_e2m1(codes)
    assert values[:8].tolist() == list(e2m1.MAGNITUDES)
    assert torch.equal(e2m1.to_e2m1(values), codes)


def test_midpoints_go_to_the_even_code_and_their_neighbours_do_not() -> None:
    for midpoint, expected in MIDPOINTS.items():
        below, above = math.nextafter(midpoint, 0), math.nextafter(midpoint, 9)
        x = torch.tensor([midpoint, -midpoint, below, above], dtype=torch.float64)
        got = e2m1.from_e2m1(e2m1.to_e2m1(x)).tolist()
        assert got[:2] == [expected, -expected]
        assert got[2] < midpoint < got[3]


def test_every_float_goes_to_a_nearest_value() -> None:
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    got = e2m1.from_e2m1(e2m1.to_e2m1(x)).double()
    table = e2m1.from_e2m1(torch.arange(16, dtype=torch.uint8)).double()
    best = (x[:, None] - table).abs().amin(1)
    assert torch.equal((x - got).abs(), best)


def test_what_lies_beyond_saturates() -> None:
    x = torch.tensor([7.0, -1e9, math.inf, -math.inf, math.nan])
    assert e2m1.from_e2m1(e2m1.to_e2m1(x)).tolist() == [6.0, -6.0, 6.0, -6.0, 6.0]


def test_scale_bytes_are_powers_of_two() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = e8m0.from_e8m0(codes)
    assert values[:-1].double().tolist() == [2.0 ** (b - 127) for b in range(255)]
    assert values[-1].isnan()


def test_a_block_scale_brings_the_largest_element_into_the_top_binade() -> None:
    amax = torch.tensor([6.0, 4.0, 3.99, 7.9, 8.0, 1e-30, 2.0**-140])
    scale = e8m0.from_e8m0(e8m0.block_scale(amax, 2)).double()
    top = amax.double()[:5] / scale[:5]
    assert bool(((top >= 4) & (top < 8)).all())
    assert scale[-1] == 2.0**-127  # the smallest there is
    assert e8m0.block_scale(torch.tensor([0.0, math.inf, math.nan]), 2).tolist() == [0, 255, 255]
