"""Trees over ranks: parents first, whatever was counted; no other tree of that size was right more often."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.speculative.rank_tree import best_paths, chain, count_paths, tree_of

ranks = st.lists(st.lists(st.integers(-1, 3), max_size=4), max_size=40)


def test_a_path_ends_where_a_head_is_wrong():
    counts = count_paths([[0, 1, -1, 0], [0, 0], [-1, 0], []])
    assert counts == Counter({(0,): 2, (0, 1): 1, (0, 0): 1})


@given(ranks, st.integers(1, 30))
def test_any_counts_give_a_tree_and_its_beginnings_are_trees(items, n):
    paths = best_paths(count_paths(items), n)
    assert len(paths) <= n
    tree = tree_of(paths)
    for size in range(len(tree) + 1):
        part = tree.first(size)
        assert all(p < i for i, p in enumerate(part.parents))
    for i, path in enumerate(paths):
        up, walked = i, []
        while up >= 0:
            assert tree.heads[up] == len(path) - 1 - len(walked)
            walked.append(tree.ranks[up])
            up = tree.parents[up]
        assert tuple(reversed(walked)) == path


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=2), min_size=1, max_size=12), st.integers(1, 4)
)
def test_no_tree_of_that_size_was_right_more_often(items, n):
    """By trying all trees: expected accepted tokens are the sum of the path counts."""
    counts = count_paths(items)
    every = list(counts)
    trees = (
        subset
        for subset in combinations(every, min(n, len(every)))
        if all(len(p) == 1 or p[:-1] in subset for p in subset)
    )
    best = max(sum(counts[p] for p in subset) for subset in trees)
    assert sum(counts[p] for p in best_paths(counts, n)) == best


def test_a_chain():
    made = chain(3)
    assert (made.heads, made.ranks, made.parents) == ((0, 1, 2), (0, 0, 0), (-1, 0, 1))


@pytest.mark.parametrize("paths", [[(0, 1)], [(0,), (0,)], [()]])
def test_what_is_no_tree_is_refused(paths):
    with pytest.raises(ValueError, match="before its parent"):
        tree_of(paths)
