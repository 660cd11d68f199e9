"""Dynamic draft trees over any scores: what is kept is a tree of the nodes worth most."""

from __future__ import annotations

import random

from workbench.speculative.dynamic_tree import GrowingTree

CHANCES = (0.0, -0.0, -1e-9, -0.5, -0.5, -3.0, 1e-12, -float("inf"))
"""Certain, nearly certain, equal, impossible, and rounded above 1."""


def grown(rng: random.Random) -> GrowingTree:
    """A tree of a few levels; equal and certain chances are frequent."""
    tree = GrowingTree()
    width, depth = rng.randint(1, 4), rng.randint(1, 5)
    asked = [-1]
    for _ in range(depth):
        newest: list[int] = []
        for node in asked:
            below = [(rng.randrange(50), rng.choice((*CHANCES, -rng.expovariate(1)))) for _ in range(width)]
            newest += tree.add(node, below)
        asked = tree.frontier(newest, width)
    return tree


def test_the_nodes_kept_of_ten_thousand_trees_are_trees_of_the_best() -> None:
    rng = random.Random(5)
    whole = 0
    for _ in range(10_000):
        tree = grown(rng)
        most = rng.randint(1, len(tree.tokens))
        chosen = tree.best(most)
        assert chosen == sorted(set(chosen)) and len(chosen) == most
        assert all(tree.parents[n] in (-1, *chosen) for n in chosen)  # no node without its parent
        left = set(range(len(tree.tokens))) - set(chosen)
        assert max((tree.values[n] for n in left), default=-float("inf")) <= min(
            tree.values[n] for n in chosen
        )
        tokens, parents, values = tree.kept(most)
        assert tokens == tuple(tree.tokens[n] for n in chosen)
        assert all(-1 <= p < i for i, p in enumerate(parents))
        assert all(v <= (values[p] if p >= 0 else 0.0) for v, p in zip(values, parents, strict=True))
        fed, above = tree.fed()
        assert [tree.tokens[n] for n in tree.expanded] == list(fed)
        assert all(-1 <= p < i for i, p in enumerate(above))
        whole += most == len(tree.tokens)
    assert 0 < whole < 10_000
