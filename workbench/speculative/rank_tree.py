"""Sparse draft trees over the ranks of independent heads, built from what was measured.

Cai et al., *Medusa* (arXiv 2401.10774, section 2.1.2 and appendix C): head k proposes its likeliest tokens
for the k-th position, and a node is a path of ranks (r_1 … r_d). The paper multiplies the accuracies of the
heads; here paths are counted as they happened together, which correlated heads make a difference to, and the
most frequent ones are taken: for that sample no tree of as many nodes accepts more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankTree:
    """Nodes with parents first: node ``i`` is token ``ranks[i]`` of head ``heads[i]`` below ``parents[i]``.

    Any first n nodes are a tree of their own.
    """

    heads: tuple[int, ...]
    ranks: tuple[int, ...]
    parents: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ranks)

    def first(self, n: int) -> RankTree:
        """The tree of the first ``n`` nodes."""
        return RankTree(self.heads[:n], self.ranks[:n], self.parents[:n])

    def among(self, width: int) -> RankTree:
        """The tree without nodes on or below a rank of ``width`` or more; it may be empty.

        >>> tree_of([(0,), (2,), (2, 0), (0, 1)]).among(2).ranks
        (0, 1)
        """
        index, kept = {-1: -1}, []
        for node, (rank, parent) in enumerate(zip(self.ranks, self.parents, strict=True)):
            if rank < width and parent in index:
                index[node] = len(kept)
                kept.append(node)
        return RankTree(
            tuple(self.heads[n] for n in kept),
            tuple(self.ranks[n] for n in kept),
            tuple(index[self.parents[n]] for n in kept),
        )


def count_paths(ranks: Iterable[Sequence[int]]) -> Counter[tuple[int, ...]]:
    """How often each path of ranks was right.

    Each item holds, head by head, the rank at which the head has the token that really came; -1, or an end,
    where none of its candidates is it: no path goes on from there.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    for item in ranks:
        path: tuple[int, ...] = ()
        for rank in item:
            if rank < 0:
                break
            path = (*path, rank)
            counts[path] += 1
    return counts


def best_paths(counts: Counter[tuple[int, ...]], n: int) -> list[tuple[int, ...]]:
    """The ``n`` paths that were right most often, shallow ones first among equals: parents come first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return [path for path, _ in ordered[:n]]


def tree_of(paths: Sequence[Sequence[int]]) -> RankTree:
    """The tree of these paths. Raises :class:`ValueError` when one comes before its parent, or twice."""
    index: dict[tuple[int, ...], int] = {(): -1}
    for path in map(tuple, paths):
        if not path or path in index or path[:-1] not in index:
            raise ValueError(f"the path {path} comes twice or before its parent")
        index[path] = len(index) - 1
    made = list(index)[1:]
    return RankTree(
        tuple(len(p) - 1 for p in made), tuple(p[-1] for p in made), tuple(index[p[:-1]] for p in made)
    )


def chain(depth: int) -> RankTree:
    """Every head's likeliest token, one below the other."""
    return tree_of([(0,) * d for d in range(1, depth + 1)])
