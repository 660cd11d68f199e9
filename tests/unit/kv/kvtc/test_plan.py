"""The bit plan is optimal for the measured errors, never over budget, and its errors are real."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from workbench.kv.kvtc.codes import Coder
from workbench.kv.kvtc.distortion import Distortion, measure
from workbench.kv.kvtc.formats import BITS, HEADER_BITS, KINDS
from workbench.kv.kvtc.plan import best_plan, truncated_plan
from workbench.spec.errors import OptionError


def brute_force(d: Distortion, budget: int) -> float:
    """Least error over every way to cut and store, by trying all."""
    rank = len(d.energy)

    def rest(at: int, left: int) -> float:
        if at == rank:
            return 0.0
        best = float(d.energy[at]) + rest(at + 1, left)
        for (i, size), (k, kind) in itertools.product(enumerate(d.sizes), enumerate(KINDS)):
            cost = size * BITS[kind] + HEADER_BITS
            if at + size <= rank and cost <= left:
                best = min(best, float(d.error[i, k, at]) + rest(at + size, left - cost))
        return best

    return rest(0, budget)


@pytest.mark.parametrize("rank", [1, 2, 5, 6])
@pytest.mark.parametrize("seed", range(3))
def test_the_plan_is_the_best_of_all(rank, seed):
    gen = torch.Generator().manual_seed(seed)
    scale = torch.rand(rank, generator=gen).sort(descending=True).values * 10
    d = measure(torch.randn(40, rank, generator=gen) * scale, sizes=(1, 2, 4))
    budgets = [0, 33, 34, 36, 40, 41, 68, 72, 100, 150, 240, 1000]
    plans = [best_plan(d, b) for b in budgets]
    for budget, plan in zip(budgets, plans, strict=True):
        assert plan.error == pytest.approx(brute_force(d, budget), rel=1e-12, abs=1e-12)
        assert plan.bits <= budget == plan.budget
    errors = [p.error for p in plans]
    assert errors == sorted(errors, reverse=True) and errors[0] == pytest.approx(float(d.energy.sum()))
    assert not plans[0].groups and plans[0].rank == 0


def test_groups_lie_in_order_without_overlap_and_the_expected_error_is_the_measured_one():
    gen = torch.Generator().manual_seed(3)
    coefficients = torch.randn(64, 200, generator=gen) * torch.logspace(1.5, -1.5, 200)
    d = measure(coefficients)
    for budget in (200, 500, 900):
        plan = best_plan(d, budget)
        ends = [0, *(g.start + g.size for g in plan.groups)]
        assert all(g.start >= end for g, end in zip(plan.groups, ends, strict=False))
        assert ends[-1] == plan.rank and sum(g.bits for g in plan.groups) == plan.bits <= budget
        coder = Coder(plan)
        back = torch.zeros_like(coefficients)
        back[:, : plan.rank] = coder.decode(coder.encode(coefficients[:, : plan.rank]))
        real = float((back - coefficients).double().square().sum() / 64)
        assert real == pytest.approx(plan.error, rel=0.05)  # large groups are interpolated


def test_early_components_get_at_least_as_many_bits():
    gen = torch.Generator().manual_seed(4)
    plan = best_plan(measure(torch.randn(64, 300, generator=gen) * torch.logspace(2, -2, 300)), 900)
    widths = [BITS[g.kind] for g in plan.groups]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) > 1


def test_bits_beat_truncation():
    gen = torch.Generator().manual_seed(5)
    d = measure(torch.randn(64, 300, generator=gen) * torch.logspace(1, -1, 300))
    planned = best_plan(d, 800)
    kept = 800 // 16  # the same bits spent on leading components in 16 bits, as exact
    assert planned.error < 0.7 * float(d.energy[kept:].sum())


def test_starts_between_measured_ones_are_interpolated_closely():
    gen = torch.Generator().manual_seed(6)
    x = torch.randn(64, 160, generator=gen) * torch.logspace(0.5, -0.5, 160)
    error = measure(x, (64,)).error[0]
    for start in (0, 1, 2, 3, 50, 95, 96):
        one = measure(x[:, start : start + 64], (64,)).error[0, :, 0]
        assert error[:, start].numpy() == pytest.approx(one.numpy(), rel=0.03)
    assert torch.isinf(error[:, 97:]).all()


def test_a_negative_budget_is_refused():
    with pytest.raises(OptionError):
        best_plan(measure(torch.randn(4, 3)), -1)


def test_the_program_and_its_errors_agree_for_sizes_beyond_the_rank():
    d = measure(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), (1, 16))
    assert np.isinf(d.error[1].numpy()).all()
    assert {g.size for g in best_plan(d, 200).groups} == {1}


@pytest.mark.parametrize("budget", [0, 39, 40, 300, 2000, 10**6])
def test_without_a_program_leading_components_take_the_budget(budget):
    gen = torch.Generator().manual_seed(5)
    d = measure(torch.randn(64, 300, generator=gen) * torch.logspace(1.5, -1.5, 300))
    plan, best = truncated_plan(d, budget), best_plan(d, budget)
    assert plan.bits <= budget and all(g.kind == "fp8" for g in plan.groups)
    assert [g.start for g in plan.groups] == [
        sum(g.size for g in plan.groups[:i]) for i in range(len(plan.groups))
    ]
    kept = {i for g in plan.groups for i in range(g.start, g.start + g.size)}
    dropped = sum(float(d.energy[i]) for i in range(300) if i not in kept)
    stored = sum(float(d.error[d.sizes.index(g.size), KINDS.index("fp8"), g.start]) for g in plan.groups)
    assert plan.error == pytest.approx(dropped + stored, rel=1e-9)
    assert best.error <= plan.error * (1 + 1e-12)
    if budget < 10**6:
        with pytest.raises(OptionError):
            truncated_plan(d, -1 - budget)
