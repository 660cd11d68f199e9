"""What a drafter may draw from: a mask that fails leaves no draft, any other mistake is told."""

from __future__ import annotations

import pytest
import torch

from workbench.engine.draft_law import RequestLaw
from workbench.engine.masks import TokenSetMask
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request, Sequence

SIZE = 8
ASKED = {
    "pick": lambda law, **given: law.pick(torch.arange(4.0), (), draws=True, **given),
    "top": lambda law, **given: law.top(torch.arange(4.0), (), 2, **given),
    "siblings": lambda law, **given: law.siblings(torch.arange(4.0), (), 2, **given),
}


class Broken:
    """A mask that raises what it is given, or gives that."""

    key = "broken"

    def __init__(self, gives):
        self.gives = gives

    def allowed(self, generated, path=()):
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives


def law_with(mask, **params):
    request = Request("r", (1, 2), SamplingParams(**params), mask)
    return RequestLaw(Sequence(0, request, 0, [1, 2], 8), SIZE)


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}], ids=str)
@pytest.mark.parametrize("how", ASKED)
@pytest.mark.parametrize(
    "gives",
    [KeyError("state"), [True] * SIZE, torch.ones(3, dtype=torch.bool), torch.zeros(SIZE, dtype=torch.bool)],
    ids=["raises", "list", "too-short", "nothing-left"],
)
def test_a_mask_that_fails_leaves_no_draft(gives, how, params):
    assert not ASKED[how](law_with(Broken(gives), **params), ids=torch.arange(4))


@pytest.mark.parametrize("how", ASKED)
def test_another_mistake_is_not_taken_for_the_masks(how):
    law = law_with(TokenSetMask(SIZE), temperature=1.0)
    assert ASKED[how](law, ids=torch.arange(4))
    with pytest.raises(RuntimeError, match="out of bounds"):
        ASKED[how](law, ids=torch.arange(4) + SIZE)
