"""How pages are grouped into products, and the indices behind them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.attention.edges import Member, build_edges, stack
from workbench.attention.runs import CALL_BYTES, plan_runs
from workbench.attention.slots import dead_tails, grow_tails, zero_slots
from workbench.attention.spans import slot_rows
from workbench.engine.seams import AttentionSpan

BIG = CALL_BYTES  # a page that is worth a call of its own
SMALL = CALL_BYTES // 64


@given(
    heights=st.dictionaries(st.integers(0, 200), st.integers(1, 96), min_size=1),
    page_bytes=st.sampled_from([SMALL, CALL_BYTES // 5, BIG]),
    every=st.integers(1, 9),
)
def test_runs_cover_every_page_once_without_overlap(heights, page_bytes, every):
    copies = sorted(heights)[::every]
    runs, total = plan_runs(heights, 3, page_bytes, copies)
    pages = [p for r in runs for p in r.pages if p in heights and not (r.view and p in copies)]
    assert sorted(pages) == sorted(heights)
    idle = sum(len(r.pages) for r in runs) - len(pages)
    assert idle <= max(1, len(heights) // 10)
    ends = 0
    for r in sorted(runs, key=lambda r: r.row):
        assert r.row == ends and all(heights.get(p, 0) <= r.height for p in r.pages)
        assert not r.view or r.pages == tuple(range(r.pages[0], r.pages[-1] + 1))
        ends += len(r.pages) * 3 * r.height
    assert ends == total


def test_contiguous_pages_are_one_view():
    runs, total = plan_runs(dict.fromkeys(range(7, 20), 3), 3, SMALL)
    assert [(r.pages, r.view, r.height) for r in runs] == [(tuple(range(7, 20)), True, 3)] and total == 13 * 9


def test_a_small_gap_is_computed_along_and_a_large_one_is_not():
    pages = [*range(30), *range(31, 60)]
    assert len(plan_runs(dict.fromkeys(pages, 3), 3, SMALL)[0]) == 1
    assert len(plan_runs(dict.fromkeys(pages, 3), 3, 2 * BIG)[0]) == 2
    far = [*range(30), *range(90, 120)]
    assert [r.view for r in plan_runs(dict.fromkeys(far, 3), 3, BIG)[0]] == [True, True]


def test_scattered_pages_are_gathered_only_when_copying_is_cheaper_than_calls():
    strays = dict.fromkeys(range(0, 400, 10), 3)
    runs, _ = plan_runs(strays, 3, SMALL)
    assert [(len(r.pages), r.view) for r in runs] == [(40, False)]
    assert all(r.view for r in plan_runs(strays, 3, BIG)[0])


def test_a_tall_stack_does_not_pad_the_short_ones():
    heights = dict.fromkeys(range(8), 96) | dict.fromkeys(range(8, 200), 3)
    assert [r.height for r in plan_runs(heights, 3, CALL_BYTES // 5)[0]] == [96, 3]


def test_edges_name_the_row_of_each_head_and_page_and_the_zero_row_beyond_a_table():
    members = [Member(0, 1, 0, (4, 2)), Member(1, 2, 0, (4,))]
    heights, offsets = stack(members, 2)
    assert heights == {4: 6, 2: 2} and offsets == [0, 0, 2]
    runs, total = plan_runs(heights, 1, BIG)
    edges = build_edges(members, offsets, runs, total, 2, 1, 4)
    (bucket,) = edges.buckets
    assert bucket.rows.tolist() == [0, 1, 2] and bucket.nb == 2
    assert (bucket.edges == total).sum() == 4
    real = bucket.edges[bucket.edges < total]
    assert len(set(real.tolist())) == len(real)
    want = {int(e): r for r, e in zip(np.repeat(np.arange(6), 2), bucket.edges, strict=True) if e < total}
    assert all(edges.query[e] == r for e, r in want.items())


def test_a_copied_page_inside_a_view_is_read_from_its_copy():
    member = Member(0, 1, 0, tuple(range(21)))
    heights, offsets = stack([member], 1)
    runs, total = plan_runs(heights, 1, CALL_BYTES // 5, [10])
    assert [(len(r.pages), r.view) for r in runs] == [(21, True), (1, False)]
    (bucket,) = build_edges([member], offsets, runs, total, 1, 1, 4).buckets
    assert bucket.edges.tolist() == [*range(10), 21, *range(11, 21)]


def test_att_05_offsets_are_64_bit_even_when_page_ids_are_not():
    assert slot_rows(np.array([131072], dtype=np.int32), 16384, [0]).tolist() == [2147483648]
    assert slot_rows(torch.tensor([131072], dtype=torch.int32), 16384, [5]).tolist() == [2147483653]


def test_att_14_writes_to_chosen_pages_of_a_huge_stride_stay_out_of_page_0():
    stride = 2**29  # four rows on, the offset passes 2**31; untouched memory is never backed
    pool = torch.empty(4 * stride + 8, dtype=torch.float16).as_strided((5, 1, 4, 2), (stride, 8, 2, 1))
    rows = torch.arange(1.0, 41.0).half().view(5, 1, 4, 2)
    pool[:] = rows
    zero_slots(pool, torch.tensor([1, 2, 3, 4]), torch.tensor([3, 3, 3, 2]))
    want = rows.clone()
    want[1:4, :, 3] = 0
    want[4, :, 2] = 0
    assert torch.equal(pool[0], rows[0]) and torch.equal(pool, want)


def test_a_page_counts_as_used_as_far_as_its_longest_owner_uses_it():
    a, b = AttentionSpan(1, 1, [3], [1]), AttentionSpan(1, 5, [3, 0], [5])
    members = [Member(0, 1, 0, (3,)), Member(1, 1, 0, (3, 0))]
    tails, scrub = dead_tails([a, b], members, 4, {})
    assert tails == {0: 2} and scrub is not None
    assert [t.tolist() for t in scrub] == [[0, 0], [2, 3]]
    assert dead_tails([a, b], members, 4, tails)[1] is None
    grow_tails(tails, [a, AttentionSpan(2, 5, [3, 0], [5, 6])], members, 4)  # a draft that is rejected later
    scrub = dead_tails([a, b], members, 4, tails)[1]
    assert scrub is not None and [t.tolist() for t in scrub] == [[0], [2]]
