"""Matrices in eight bits: within half a step of their row, everything else untouched."""

from __future__ import annotations

import torch

from workbench.models.coded_head import STEP, decoded, encoded


def test_a_weight_is_off_by_half_a_step_at_most_and_the_rest_is_as_it_was():
    gen = torch.Generator().manual_seed(1)
    sizes = torch.logspace(-4, 2, 9)[:, None]
    tensors = {
        "m.weight": torch.randn(9, 31, generator=gen) * sizes,
        "norm.weight": torch.randn(31, generator=gen).double(),
        "ids": torch.arange(7, dtype=torch.int32),
    }
    coded = encoded(tensors)
    assert coded["m.weight"].dtype == torch.int8 and coded["m.weight" + STEP].shape == (9,)
    back = decoded(coded)
    assert back.keys() == tensors.keys()
    assert torch.equal(back["norm.weight"], tensors["norm.weight"]) and torch.equal(
        back["ids"], tensors["ids"]
    )
    off = (back["m.weight"] - tensors["m.weight"]).abs()
    assert bool((off <= coded["m.weight" + STEP][:, None] * 0.5001).all())
    assert bool((off.amax(1) > 0).all())
    again = encoded(back)
    assert torch.equal(again["m.weight"], coded["m.weight"])


def test_rows_of_zeros_stay_zeros():
    tensors = {"m": torch.zeros(3, 4), "n": torch.eye(3)}
    assert all(torch.equal(a, tensors[n]) for n, a in decoded(encoded(tensors)).items())
