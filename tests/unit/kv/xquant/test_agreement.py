"""Agreement of codes, against chance."""

from __future__ import annotations

import pytest
import torch

from workbench.kv.xquant.agreement import Agreement, difference, joint_counts, shuffled_tokens

SHAPE = (4, 2, 64, 32)


def skewed(shape=SHAPE, seed: int = 0) -> torch.Tensor:
    """Codes whose middle levels are common, as those of bell-shaped data."""
    generator = torch.Generator().manual_seed(seed)
    law = torch.tensor([0.1, 0.4, 0.4, 0.1])
    n = torch.Size(shape).numel()
    return torch.multinomial(law, n, True, generator=generator).view(shape).to(torch.uint8)


def agreement(a: torch.Tensor, b: torch.Tensor) -> Agreement:
    return Agreement.of(joint_counts(a, b, 4), joint_counts(a, shuffled_tokens(b, 1), 4))


def test_counts_are_a_contingency_table() -> None:
    a, b = torch.tensor([0, 1, 1, 3], dtype=torch.uint8), torch.tensor([2, 1, 1, 0], dtype=torch.uint8)
    joint = joint_counts(a, b, 4)
    assert joint[0, 2] == 1 and joint[1, 1] == 2 and joint[3, 0] == 1 and joint.sum() == 4
    assert difference(joint).tolist() == [0.5, 0.0, 0.25, 0.25]


def test_independent_codes_are_often_close_and_that_means_nothing() -> None:
    found = agreement(skewed(seed=0), skewed(seed=1))
    assert found.observed[:2].sum() > 0.78  # "80% within one"
    assert found.observed == pytest.approx(found.chance, abs=0.02)
    assert found.kappa == pytest.approx(0, abs=0.03)


def test_equal_codes_agree_and_noise_lowers_it() -> None:
    a = skewed()
    assert agreement(a, a).kappa == pytest.approx(1)
    half = torch.where(torch.rand(SHAPE, generator=torch.Generator().manual_seed(2)) < 0.5, a, skewed(seed=3))
    assert agreement(a, half).kappa == pytest.approx(0.5, abs=0.03)


def test_what_channels_have_in_common_is_not_agreement_about_tokens() -> None:
    """The marginals alone would call this agreement; the shuffled control does not."""
    level = torch.arange(32, dtype=torch.uint8) % 4
    noise = torch.Generator().manual_seed(0)
    a, b = (
        torch.where(torch.rand(SHAPE, generator=noise) < 0.7, level.expand(SHAPE), skewed(seed=s))
        for s in (1, 2)
    )
    found = agreement(a, b)
    assert found.observed[0] > found.chance[0] + 0.2
    assert found.kappa == pytest.approx(0, abs=0.03)


def test_shuffling_moves_whole_tokens() -> None:
    codes = torch.arange(4 * 64, dtype=torch.int64).view(4, 1, 64, 1).expand(SHAPE)
    moved = shuffled_tokens(codes, 0)
    assert not torch.equal(moved, codes)
    assert (moved == moved[:, :1, :, :1]).all()
    assert moved[:, 0, :, 0].flatten().sort().values.tolist() == list(range(4 * 64))


def test_rows_say_percentages() -> None:
    row = agreement(skewed(), skewed(seed=1)).row()
    for name in ("observed", "chance", "shuffled"):
        assert sum(row[f"{name} |Δ|={i}"] for i in range(4)) == pytest.approx(100)
        assert row[f"{name} |Δ|≤1"] == pytest.approx(row[f"{name} |Δ|=0"] + row[f"{name} |Δ|=1"])
