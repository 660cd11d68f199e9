"""E4M3: all 256 codes, rounding to even, saturation."""

from __future__ import annotations

import itertools
import math

import torch

from workbench.numerics.e4m3 import LARGEST, from_e4m3, to_e4m3


def decode(code: int) -> float:
    """One code straight from the format's definition."""
    sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


TABLE = [decode(c) for c in range(256)]
FINITE = [c for c in range(256) if not math.isnan(TABLE[c])]


def test_all_finite_codes_decode_to_the_table_and_encode_back() -> None:
    codes = torch.tensor(FINITE, dtype=torch.uint8)
    values = from_e4m3(codes.view(torch.float8_e4m3fn))
    assert values.tolist() == [TABLE[c] for c in FINITE]
    assert torch.equal(to_e4m3(values).view(torch.uint8), codes)


def test_smallest_code_is_two_to_the_minus_nine() -> None:
    assert from_e4m3(torch.tensor([1], dtype=torch.uint8).view(torch.float8_e4m3fn)).item() == 0.001953125


def test_ties_go_to_even_codes() -> None:
    positive = [TABLE[c] for c in range(127)]
    for code, (a, b) in enumerate(itertools.pairwise(positive)):
        got = to_e4m3(torch.tensor([(a + b) / 2])).view(torch.uint8).item()
        assert got == code + code % 2


def test_beyond_the_range_saturates_and_between_256_and_448_does_not_collapse() -> None:
    x = torch.tensor([449.0, 1e9, math.inf, -math.inf, -500.0])
    assert from_e4m3(to_e4m3(x)).tolist() == [LARGEST, LARGEST, LARGEST, -LARGEST, -LARGEST]
    grid = [256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0]
    assert from_e4m3(to_e4m3(torch.tensor(grid))).tolist() == grid
