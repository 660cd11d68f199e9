"""Dynamic draft trees: grow where the drafter is confident, then keep the nodes likeliest to be reached.

Li et al., *EAGLE-2* (arXiv 2406.16858, section 4): a node's value is the product of the chances on its path,
which stands for the chance that all of it is accepted. Each level expands the ``width`` best of its
candidates; at the end all nodes made are ranked again and the best kept. A child is never worth more than
its parent, and among equals the elder wins, so what is kept is a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class GrowingTree:
    """One sequence's tree; ``values``: logarithms of path chances. Nodes come after their parents."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)  # nodes whose children were asked for, in that order

    def add(self, parent: int, candidates: Sequence[tuple[int, float]]) -> list[int]:
        """Children of a node (-1: the root) with the logarithms of their chances; their numbers."""
        first = len(self.tokens)
        above = self.values[parent] if parent >= 0 else 0.0
        for token, chance in candidates:
            self.tokens.append(token)
            self.parents.append(parent)
            self.values.append(above + min(chance, 0.0))
        return list(range(first, len(self.tokens)))

    def path(self, node: int) -> list[int]:
        """Tokens from the root's child to the node itself."""
        out: list[int] = []
        while node >= 0:
            out.append(self.tokens[node])
            node = self.parents[node]
        return out[::-1]

    def frontier(self, among: Sequence[int], width: int) -> list[int]:
        """The ``width`` best of these nodes, elder ones first; they count as expanded."""
        best = sorted(sorted(among, key=lambda n: (-self.values[n], n))[:width])
        self.expanded += best
        return best

    def fed(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens and parents (within these) of the expanded nodes, in the order they were expanded."""
        place = {n: i for i, n in enumerate(self.expanded)}
        tokens = tuple(self.tokens[n] for n in self.expanded)
        return tokens, tuple(place[self.parents[n]] if self.parents[n] >= 0 else -1 for n in self.expanded)

    def best(self, nodes: int) -> list[int]:
        """The ``nodes`` worth most, parents first."""
        return sorted(sorted(range(len(self.tokens)), key=lambda n: (-self.values[n], n))[:nodes])

    def kept(self, nodes: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
        """Tokens, parents and path values of the best nodes."""
        chosen = self.best(nodes)
        place = {-1: -1, **{n: i for i, n in enumerate(chosen)}}
        return (
            tuple(self.tokens[n] for n in chosen),
            tuple(place[self.parents[n]] for n in chosen),
            tuple(self.values[n] for n in chosen),
        )
