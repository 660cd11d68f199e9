"""The oracle against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from workbench.attention.pages import TorchPages
from workbench.attention.pinned import PinnedAttention
from workbench.attention.reference import SPEC, Config, ReferenceAttention, attend, attention_mask, bind
from workbench.engine.seams import AttentionShape, AttentionSpan
from workbench.spec.errors import InvariantError, WrongShape
from workbench.spec.technique import options_of

OPS = [ReferenceAttention, TorchPages, PinnedAttention]


@pytest.mark.parametrize("op", [o() for o in OPS], ids=lambda o: o.name)
def test_att_01_fewer_queries_than_keys_are_aligned_at_the_bottom_right(op):
    shape = AttentionShape(1, 1, 1, 4)
    span = AttentionSpan(2, 3, [1, 0], [3, 4])
    v = torch.zeros(2, 1, 4, 1)
    v[1, 0, :, 0], v[0, 0, 0, 0] = torch.tensor([1.0, 2, 3, 4]), 5.0
    out = op.run(op.prepare([span], shape), torch.zeros(2, 1, 1), torch.zeros(2, 1, 4, 1), v)
    torch.testing.assert_close(out[:, 0], torch.tensor([2.5, 3.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_att_03_a_row_that_sees_nothing_is_exactly_zero_and_moves_nobody(dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 8).to(dtype)
    mask = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])
    full = mask.clone()
    full[2] = True
    out = attend(x, x, x, mask)
    assert torch.equal(out[2], torch.zeros(2, 8, dtype=dtype))
    assert torch.equal(out[:2], attend(x, x, x, full)[:2])
    torch.testing.assert_close(out[:2], attend(x[:2], x, x, mask[:2]))
    assert attend(out, out, out, mask).isfinite().all()


@pytest.mark.parametrize("op", [o() for o in OPS], ids=lambda o: o.name)
@pytest.mark.parametrize("n", [1, 3, 20])
def test_att_03_a_window_of_nothing_and_an_empty_batch_element_give_zeros(op, n):
    shape = AttentionShape(2, 1, 8, 4, window=0)
    spans = [AttentionSpan(n, 6, range(8), range(6, 6 + n)), AttentionSpan(0, 3, [8], [])]
    torch.manual_seed(0)
    q, k, v = torch.randn(n, 2, 8), torch.randn(9, 1, 4, 8), torch.randn(9, 1, 4, 8)
    assert torch.equal(op.run(op.prepare(spans, shape), q, k, v), torch.zeros(n, 16))
    assert op.run(op.prepare(spans[1:], shape), q[:0], k, v).shape == (0, 16)


def test_tree_rows_see_their_own_branch_only():
    span = AttentionSpan(4, 2, [0, 1], [2, 3, 3, 4], parents=[-1, 0, 0, 2])
    seen = attention_mask(span, AttentionShape(1, 1, 1, 4)).int().tolist()
    assert seen == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 0, 1, 1]]


def test_a_window_counts_positions_not_slots():
    span = AttentionSpan(4, 2, [0, 1], [2, 3, 3, 4], parents=[-1, 0, 0, 2])
    seen = attention_mask(span, AttentionShape(1, 1, 1, 4, window=2)).int().tolist()
    assert seen == [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1]]


def test_soft_cap_bounds_scores():
    q, k = torch.full((1, 1, 1), 100.0), torch.tensor([[[1.0]], [[-1.0]]])
    v = torch.tensor([[[1.0]], [[0.0]]])
    out = attend(q, k, v, torch.ones(1, 2, dtype=torch.bool), soft_cap=0.5)
    torch.testing.assert_close(out.item(), torch.sigmoid(torch.tensor(1.0)).item())


@pytest.mark.parametrize("op", [o() for o in OPS], ids=lambda o: o.name)
@pytest.mark.parametrize(
    ("span", "message"),
    [
        (AttentionSpan(2, 3, [0], [3, 4]), "needs 5 slots"),
        (AttentionSpan(2, 0, [0], [0]), "1 positions"),
        (AttentionSpan(2, 0, [0], [0, 1], parents=[-1, 1]), "row 1 has parent 1"),
        (AttentionSpan(2, 0, [0], [0, 1], parents=[-1]), "1 parents for 2 rows"),
    ],
)
def test_contradicting_spans_are_refused_by_name(op, span, message):
    with pytest.raises(InvariantError, match=f"Attention span 0.*{message}"):
        op.prepare([span], AttentionShape(1, 1, 1, 4))


@pytest.mark.parametrize("op", [o() for o in OPS], ids=lambda o: o.name)
def test_heads_that_do_not_divide_are_refused(op):
    with pytest.raises(WrongShape, match="9 query heads"):
        op.prepare([], AttentionShape(9, 2, 64, 16))


def test_the_catalogue_entry_is_the_oracle():
    assert (SPEC.id, SPEC.family, SPEC.seam) == ("reference", "attention", "attention")
    assert SPEC.claims_slot == ("attention",)
    assert options_of(Config) == () and bind(Config(), None).name == "reference"
