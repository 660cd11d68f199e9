"""The grid: groups of any size, exact zeros, half-step errors, and the Q4_1 trap."""

from __future__ import annotations

import pytest
import torch

from workbench.quant.grid import WHOLE_ROW, round_to_nearest
from workbench.spec.errors import OptionError

BITS = pytest.mark.parametrize("bits", [4, 8])


@BITS
def test_qnt_01_a_short_last_group_is_a_group_of_its_own(bits: int, seeded: None) -> None:
    weight = torch.randn(3, 10)
    grid = round_to_nearest(weight, bits, 4)
    assert grid.step.shape == (3, 3) and grid.values().shape == (3, 10)
    tail = round_to_nearest(weight[:, 8:], bits, 2)
    assert torch.equal(grid.values()[:, 8:], tail.values())


@BITS
def test_qnt_02_minus_one_is_the_whole_row(bits: int, seeded: None) -> None:
    weight = torch.randn(3, 10)
    whole, ten = round_to_nearest(weight, bits, WHOLE_ROW), round_to_nearest(weight, bits, 10)
    assert whole.step.shape == (3, 1)
    assert torch.equal(whole.codes, ten.codes) and torch.equal(whole.values(), ten.values())


@BITS
def test_qnt_05_zero_rows_and_groups_are_exact_and_leave_others_alone(bits: int, seeded: None) -> None:
    weight = torch.randn(6, 64)
    before = round_to_nearest(weight, bits, 16).values()
    weight[2], weight[4, 16:32] = 0, 0
    after = round_to_nearest(weight, bits, 16).values()
    assert (after[2] == 0).all() and (after[4, 16:32] == 0).all()
    untouched = torch.ones_like(weight, dtype=torch.bool)
    untouched[2], untouched[4, 16:32] = False, False
    assert torch.equal(after[untouched], before[untouched])
    assert (round_to_nearest(torch.zeros(4, 32), bits, 16).values() == 0).all()


@BITS
@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_error_is_half_a_step_and_what_the_parameters_rounding_costs(
    bits: int, offset: float, seeded: None
) -> None:
    weight = torch.randn(16, 96) + offset
    grid = round_to_nearest(weight, bits, 32)
    step = grid.per_weight(grid.step.float())
    # bfloat16 rounds to 2^-9: a step that is too small leaves the ends of the range uncovered by at most
    # 8 (127) steps times 2^-9, and the centre is off by 2^-9 of itself; only clamped codes pay for it.
    ends = (8 if bits == 4 else 127) * 2**-8 * step
    centre = 0 if grid.centre is None else grid.per_weight(grid.centre.float()).abs() * 2**-8
    error = (grid.values() - weight).abs()
    assert (error <= step / 2 + ends + centre).all()
    low, high = (0, 15) if bits == 4 else (-127, 127)
    inner = (grid.codes > low) & (grid.codes < high)
    assert (error[inner] <= step[inner] / 2 + 1e-6).all()


def test_trap_a_q4_1_checkpoint_comes_back_nearly_unchanged_at_group_32(seeded: None) -> None:
    """Not evidence of quality: the weights were on this grid already (float16 step and minimum, group 32)."""
    codes = torch.randint(0, 16, (64, 18, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    step = (torch.rand(64, 18, 1) * 0.02 + 0.005).half().float()
    minimum = (-7.3 * step + torch.randn(64, 18, 1) * 0.003).half().float()
    weight = (codes * step + minimum).flatten(1)

    def noise(group: int) -> float:
        error = round_to_nearest(weight, 4, group).values() - weight
        return float(error.square().mean() / weight.square().mean())

    assert noise(32) < 1e-4 < 20 * noise(32) < noise(64)


@pytest.mark.parametrize(("bits", "group"), [(3, 32), (4, 0), (4, -2)])
def test_widths_and_groups_that_do_not_exist_are_refused(bits: int, group: int) -> None:
    with pytest.raises(OptionError, match=r"layers\.3"):
        round_to_nearest(torch.zeros(4, 8), bits, group, "model.layers.3.mlp.down_proj")


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    weight = torch.ones(4, 8)
    weight[1, 1] = torch.nan
    with pytest.raises(OptionError, match="o_proj"):
        round_to_nearest(weight, 4, 4, "o_proj")


def test_a_group_larger_than_the_input_is_one_group(seeded: None) -> None:
    weight = torch.randn(4, 24)
    assert round_to_nearest(weight, 4, 128).step.shape == (4, 1)
