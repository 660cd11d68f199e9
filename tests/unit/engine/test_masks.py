"""Token-set masks, and the masks of a draft's rows."""

import itertools

import pytest
import torch

from workbench.engine.draft_seams import DraftTree
from workbench.engine.masks import TokenSetMask
from workbench.engine.sampling import check_alive, row_masks, row_paths
from workbench.spec.errors import MaskError


def test_allow_and_ban():
    assert TokenSetMask(4, allow=[0, 2]).allowed([]).tolist() == [True, False, True, False]
    assert TokenSetMask(4, ban=[3]).allowed([1], [2]).tolist() == [True, True, True, False]
    assert TokenSetMask(4, allow=[0, 2], ban=[2]).allowed([]).tolist() == [True, False, False, False]


def test_the_key_names_the_set():
    assert TokenSetMask(4, allow=[2, 0, 0]).key == TokenSetMask(4, ban=[1, 3]).key
    assert TokenSetMask(4, allow=[0]).key != TokenSetMask(4, allow=[1]).key != TokenSetMask(5, allow=[1]).key


@pytest.mark.parametrize("kwargs", [{"allow": [0, 4]}, {"ban": [-1]}, {"ban": [4, 5]}])
def test_ids_the_model_lacks_are_named(kwargs):
    with pytest.raises(MaskError, match=r"tokens the model lacks: (4|-1)") as caught:
        TokenSetMask(4, **kwargs)
    assert "0 to 3" in caught.value.hint


@pytest.mark.parametrize("kwargs", [{"allow": []}, {"ban": [0, 1]}, {"allow": [1], "ban": [1]}])
def test_a_mask_must_leave_a_token(kwargs):
    with pytest.raises(MaskError, match="allows none of the 2 tokens"):
        TokenSetMask(2, **kwargs)


class Countdown:
    """Ids must fall by one; nothing may follow 0. Refuses to be asked about ids outside its language."""

    key = "countdown"

    def allowed(self, generated, path=()):
        ids = [*generated, *path]
        assert all(b == a - 1 for a, b in itertools.pairwise(ids)), "asked about an invalid path"
        out = torch.zeros(5, dtype=torch.bool)
        if ids[-1] > 0:
            out[ids[-1] - 1] = True
        return out


def test_rows_behind_a_forbidden_node_are_not_asked_about():
    tree = DraftTree((1, 4, 0, 3), (-1, -1, 0, 1), "toy")
    assert row_paths(tree) == [(), (1,), (4,), (1, 0), (4, 3)]
    masks, dead = row_masks(Countdown(), tree, [2])
    assert [None if m is None else m.nonzero()[:, 0].tolist() for m in masks] == [[1], [0], None, None, None]
    assert dead == {3}  # after 2 1 0 nothing may follow


def test_a_dead_end_is_an_error_only_when_the_output_gets_there():
    check_alive({3}, (0,))
    with pytest.raises(MaskError, match="allows no token"):
        check_alive({3}, (0, 2))
    masks, dead = row_masks(Countdown(), None, [0])
    assert masks == [None]
    with pytest.raises(MaskError, match="allows no token"):
        check_alive(dead)
