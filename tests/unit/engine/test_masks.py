"""Token-set masks, and the masks of a draft's rows."""

import itertools

import pytest
import torch

from workbench.engine.draft_seams import DraftTree
from workbench.engine.masks import TokenSetMask
from workbench.engine.sampling import check_alive, row_masks, row_paths, until_end, within
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


def test_what_a_mask_forbids_of_a_draft_is_dropped_with_all_below_it():
    tree = DraftTree((1, 4, 0, 3, 1), (-1, -1, 0, 1, 2), "toy", confidence=(0.5, 0.1, 0.4, 0.2, 0.3))
    kept = within(Countdown(), tree, [2])
    assert (kept.tokens, kept.parents, kept.confidence) == ((1, 0), (-1, 0), (0.5, 0.4))
    branches = DraftTree((3, 1, 0, 2), (-1, -1, 1, 1), "toy")
    kept = within(Countdown(), branches, [2])
    assert (kept.tokens, kept.parents, kept.source) == ((1, 0), (-1, 0), "toy")
    sampled = DraftTree.chain((1, 4), "toy", torch.full((2, 5), 0.2))
    assert within(Countdown(), sampled, [2]) is sampled  # dropping what was drawn would bias the output


def test_what_hangs_below_an_end_token_is_dropped():
    tree = DraftTree((1, 4, 0, 3, 1), (-1, -1, 0, 1, 3), "toy", confidence=(0.5, 0.1, 0.4, 0.2, 0.3))
    kept = until_end(tree, {4})
    assert (kept.tokens, kept.parents, kept.confidence) == ((1, 4, 0), (-1, -1, 0), (0.5, 0.1, 0.4))
    assert until_end(tree, {0, 2}) is tree  # nothing hangs below 0
    sampled = DraftTree.chain((1, 4, 2), "toy", torch.arange(15.0).view(3, 5))
    kept = until_end(sampled, {4})
    assert kept.tokens == (1, 4) and kept.q.tolist() == sampled.q[:2].tolist()
    # a chain where branches were drawn would be judged by another rule, because of what was drawn
    branches = DraftTree((4, 1, 2), (-1, 0, 0), "toy", torch.full((3, 5), 0.2))
    assert until_end(branches, {4}) is branches


def test_forbidden_drafts_cost_no_rows_and_count_nowhere(lab, scripted):
    class Fixed(scripted.Replay):
        def propose(self, contexts):
            return [DraftTree.chain((7, 9, 3, 8)[: c.room], "fixed") for c in contexts]

    prompt, plain = [5, 6, 4], lab.make_engine("paged", dtype="float32")
    engine = scripted.attach(lab.make_engine("paged", "ngram", dtype="float32"), Fixed([], 4))
    with torch.inference_mode():
        for banned, parts in ((3, {(7, 9), (7,)}), (7, set())):
            mask = TokenSetMask(61, ban=[banned])
            ran = lab.run_engine(engine, [prompt], mask=mask, max_tokens=12, ignore_eos=True)
            assert (
                ran.ids() == lab.run_engine(plain, [prompt], mask=mask, max_tokens=12, ignore_eos=True).ids()
            )
            drafts = {d.tokens for s in ran.steps for d in s.drafts}
            assert drafts <= parts and bool(drafts) == bool(parts)
            assert max(s.rows for s in ran.steps if not s.prefill) == (3 if parts else 1)


def test_a_dead_end_is_an_error_only_when_the_output_gets_there():
    check_alive({3}, (0,))
    with pytest.raises(MaskError, match="allows no token"):
        check_alive({3}, (0, 2))
    masks, dead = row_masks(Countdown(), None, [0])
    assert masks == [None]
    with pytest.raises(MaskError, match="allows no token"):
        check_alive(dead)
