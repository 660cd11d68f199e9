"""Values expected from keys: exact arithmetic everywhere, fewer bits where they are related."""

from __future__ import annotations

import numpy as np
import torch

from workbench.kv.kvtc import ranges
from workbench.kv.kvtc.codes import Coder
from workbench.kv.kvtc.cross import Cross
from workbench.kv.kvtc.formats import KINDS
from workbench.kv.kvtc.plan import BitPlan, Group


def test_the_expectation_is_that_of_integers(calibration):
    cross, gen = calibration.cross, torch.Generator().manual_seed(0)
    keys = torch.randn(20, cross.weights.shape[0], generator=gen, dtype=torch.float64) * 30
    got = cross.expect(keys)
    assert int(cross.weights.abs().max()) > 1000
    fixed = np.round(np.ldexp(keys.numpy(), 12 - cross.k_scale.numpy())).astype(object)
    whole = fixed.dot(cross.weights.numpy().astype(object))  # Python integers
    want = np.array([[int(x) for x in row] for row in whole], dtype=np.float64)
    assert np.array_equal(got.numpy(), np.ldexp(want, cross.v_scale.numpy() - 25))
    order = torch.randperm(len(cross.k_scale), generator=gen)
    shuffled = Cross(cross.weights[order], cross.k_scale[order], cross.v_scale)
    assert torch.equal(shuffled.expect(keys[:, order]), got)


def test_a_coefficient_beyond_fixed_point_saturates_and_stays_exact(calibration):
    cross = calibration.cross
    huge = torch.full((1, cross.weights.shape[0]), 1e30, dtype=torch.float64)
    assert bool(torch.isfinite(cross.expect(huge)).all())


def test_a_cut_map_expects_what_the_whole_does_with_the_other_keys_at_zero(calibration):
    keys = torch.randn(5, calibration.cross.weights.shape[0], dtype=torch.float64)
    few = calibration.cross.cut(7, 20)
    rest = keys.clone()
    rest[:, 7:] = 0
    assert torch.equal(few.expect(keys), calibration.cross.expect(rest)[:, :20])
    assert few.nbytes == 2 * (7 * 20 + 7 + 20)


PLAN = BitPlan(
    (Group(0, 1, "int2"), Group(1, 16, "fp8"), Group(20, 64, "int4"), Group(84, 64, "int2")), 0.0, 9999
)


def test_exact_coefficients_are_the_decoded_ones():
    coder = Coder(PLAN)
    codes = coder.encode(torch.randn(30, PLAN.rank) * torch.logspace(2, -2, PLAN.rank))
    torch.testing.assert_close(coder.exact(codes).float(), coder.decode(codes), rtol=1e-6, atol=1e-6)


def test_related_values_take_fewer_bits_and_come_back():
    """Keys that nearly determine the values."""
    coder, gen = Coder(PLAN), torch.Generator().manual_seed(0)
    scale = torch.zeros(PLAN.rank, dtype=torch.int16)
    keys = coder.encode(torch.randn(320, PLAN.rank, generator=gen))
    weights = torch.randint(-4000, 4000, (PLAN.rank, PLAN.rank), generator=gen).to(torch.int16)
    expected = Cross(weights, scale, scale).expect(coder.exact(keys))
    values = coder.encode((expected + 0.2 * torch.randn(expected.shape, generator=gen)).float())
    with_keys, without = ranges.encode(values, coder, expected), ranges.encode(values, coder)
    assert len(with_keys) < 0.8 * len(without)
    back = ranges.decode(with_keys, coder, 320, expected)
    assert all(torch.equal(back.symbols[kind], values.symbols[kind]) for kind in KINDS)
