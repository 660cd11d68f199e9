"""The tile walk: its last state is attention, every state is attention over the keys seen so far."""

from __future__ import annotations

import math

import pytest
import torch

from workbench.kernels.attention.tile_walk import LOG2_E, walk
from workbench.spec.errors import UnsupportedInput


@pytest.mark.parametrize("last_first", [True, False])
@pytest.mark.parametrize(("n", "tile"), [(1, 1), (7, 3), (64, 64), (65, 16), (40, 100)])
def test_every_state_is_softmax_attention_over_the_keys_seen(
    n: int, tile: int, last_first: bool, generator: torch.Generator
) -> None:
    q, k, v = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((8,), (n, 8), (n, 5)))
    steps = walk(q, k, v, tile, scale=3.0, last_first=last_first)
    assert len(steps) == -(-n // tile)
    seen = torch.zeros(n, dtype=torch.bool)
    for step in steps:
        assert not seen[step.first : step.end].any()
        seen[step.first : step.end] = True
        s = (k[seen] @ q) * 3.0
        torch.testing.assert_close(step.normalised, torch.softmax(s, 0) @ v[seen], rtol=1e-12, atol=1e-12)
        assert step.top == pytest.approx(float(s.max()) * LOG2_E, rel=1e-12)
        lse = step.top / LOG2_E + math.log(step.total)
        assert lse == pytest.approx(float(torch.logsumexp(s, 0)), rel=1e-12)
    assert seen.all()


def test_scores_beyond_the_range_of_exp_are_no_problem() -> None:
    k = torch.tensor([[-4000.0], [3000.0], [2999.0]])
    last = walk(torch.ones(1), k, torch.tensor([[1.0], [2.0], [4.0]]), 1)[-1]
    assert last.normalised.item() == pytest.approx((2 + 4 / math.e) / (1 + 1 / math.e))


def test_what_is_no_row_is_refused() -> None:
    one = torch.ones(4, 8)
    for bad in ((one, one, one), (one[0], one[:0], one[:0]), (one[0], one, one[:2])):
        with pytest.raises(UnsupportedInput, match="no attention row"):
            walk(*bad, tile=2)
    with pytest.raises(UnsupportedInput, match="tile"):
        walk(one[0], one, one, 0)
