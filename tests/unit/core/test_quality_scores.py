"""Scores of a window: two engines that are both broken never pass for two that agree."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.core.quality_scores import WindowScores
from workbench.spec.errors import RequestError


def test_a_plain_model_without_finite_logits_is_nothing_to_compare_with():
    logits = torch.zeros(2, 5)
    broken = logits.clone()
    broken[1] = math.nan
    scores = WindowScores()
    with pytest.raises(RequestError, match="plain model's logits are not finite"):
        scores.add(broken, broken, [1, 2])
    assert scores == WindowScores()


def test_a_recipe_without_finite_logits_has_no_divergence_of_zero():
    plain = torch.zeros(1, 5)
    scores = WindowScores()
    scores.add(torch.full((1, 5), math.nan), plain, [1])
    assert math.isnan(scores.kl[0]) and math.isnan(scores.nll[0])


def test_tokens_that_are_ruled_out_are_no_fault():
    plain = torch.tensor([[0.0, 1.0, -math.inf]])
    scores = WindowScores()
    scores.add(plain, plain, [1])
    assert scores.kl == [0.0] and scores.agree == [True]
