"""Arrays the decode kernels read: ancestor words of any tree, rows of any drafts, splits of any length."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench.attention.spans import ancestors
from workbench.engine.draft_seams import DraftTree
from workbench.engine.sampling import row_paths
from workbench.kernels.attention.splits import MOST_SPLITS, chunk_tokens, split_count
from workbench.kernels.layouts.tree import tree_rows, unpack
from workbench.kernels.layouts.verdict import drafts


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    n = draw(st.integers(0, 70))
    return [draw(st.integers(-1, i - 1)) for i in range(n)]


@given(st.lists(parents(), min_size=1, max_size=4), st.integers(1, 80))
def test_words_are_the_ancestors_and_a_window_drops_the_far_ones(trees: list[list[int]], window: int) -> None:
    rows, near = tree_rows(trees), tree_rows(trees, window=window)
    for b, tree in enumerate(trees):
        own = slice(int(rows.first[b]), int(rows.first[b + 1]))
        seen = torch.from_numpy(ancestors(tree, len(tree)))
        depth = rows.depth[own]
        assert torch.equal(unpack(rows.words[own], len(tree)), seen)
        assert torch.equal(depth + 1, seen.sum(1).int())
        close = seen & (depth[:, None] - depth[None, :] < window)
        assert torch.equal(unpack(near.words[own], len(tree)), close)


@given(st.lists(parents(), min_size=1, max_size=4))
def test_rows_of_drafts_have_the_depth_of_their_paths(trees: list[list[int]]) -> None:
    made = drafts([(list(range(len(tree))), tree) for tree in trees])
    depths = [
        len(path)
        for tree in trees
        for path in row_paths(DraftTree(tuple(range(len(tree))), tuple(tree), "test"))
    ]
    assert made.depth.tolist() == depths
    assert made.owner.bincount().tolist() == [len(tree) + 1 for tree in trees]
    assert made.first.tolist() == [0, *torch.tensor([len(t) for t in trees]).cumsum(0).tolist()]


@given(st.integers(1, 4096), st.integers(1, 10**6), st.sampled_from([16, 64, 128]), st.integers(0, 2**32))
def test_splits_cover_every_token_with_none_to_spare(
    programs: int, longest: int, unit: int, head_bytes: int
) -> None:
    blocks = -(-longest // unit)
    splits = split_count(programs, blocks, head_bytes=head_bytes)
    chunk = chunk_tokens(longest, splits, unit)
    assert 1 <= splits <= min(MOST_SPLITS, blocks)
    assert chunk % unit == 0
    assert chunk * splits >= longest
    assert -(-longest // chunk) <= splits
