"""One stream of Mirror's drafter: chains below chosen nodes of its tree, and what is known to follow a node.

Mirror Speculative Decoding (arXiv 2510.13161). A window is the chain below the root; its branches hang below
its nodes, so that a verdict that was foreseen makes a branch the next window without a row fed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.speculative.placement.draft_stream import DraftStream
from workbench.speculative.placement.messages import ROOT
from workbench.speculative.placement.tree_kv import TreeKV


class MirrorStream(DraftStream):
    """Chains below chosen nodes; what is known to follow a node is remembered while the node lives."""

    def __init__(self, kv: TreeKV, tokens: Sequence[int], gamma: int, kappa: int) -> None:
        nodes = gamma + (gamma + 1) * kappa * (gamma + 1)
        super().__init__(kv, tokens, top=kappa + 1, max_nodes=nodes, max_depth=2 * gamma + 1)
        self.ranked: dict[int, list[tuple[int, float]]] = {}
        self.rows = 0

    def know(self, nodes: Sequence[int]) -> bool:
        """See to it that what follows these nodes is known; whether anything had to be fed."""
        new = [n for n in nodes if n not in self.ranked]
        if not new:
            return False
        logits, rows = self.feed_root() if new == [ROOT] else self.feed(new)
        self.rows += rows
        for node, pairs in zip(new, self.kv.ranked(logits, self.top), strict=True):
            self.ranked[node] = [(token, chance) for token, chance in pairs if math.isfinite(chance)]
        return True

    def extend(self, nodes: Sequence[int], length: int) -> tuple[list[int], int]:
        """The likeliest chain of ``length`` below each node: its last nodes, and the levels that were fed."""
        ends, levels = list(nodes), 0
        for _ in range(length):
            levels += self.know(ends)
            ends = [self._below(n, self.ranked[n][0]) for n in ends]
        return ends, levels

    def chain(self, length: int) -> list[int]:
        """The nodes that hang below the root as a window, as many as there are."""
        out: list[int] = []
        at = ROOT
        while len(out) < length and (below := self.tree.children(at)):
            at = below[0]
            out.append(at)
        return out

    def put(self, parent: int, token: int, chance: float | None = None) -> int:
        """The child with a token, as candidates of a proxy become nodes; ``chance``: its logarithm there."""
        if chance is None:
            chance = dict(self.ranked.get(parent, ())).get(token, 0.0)
        return self._below(parent, (token, chance))

    def settle(self, tokens: Sequence[int]) -> None:
        """A verdict."""
        new = self.tree.path(self._find(tokens))[-1:] if self._find(tokens) != ROOT else []
        known = self.ranked.get(new[0]) if new else None
        self.commit(tokens)
        self.ranked = {n: r for n, r in self.ranked.items() if n in self.tree.nodes}
        if known is not None:
            self.ranked[ROOT] = known

    def _find(self, tokens: Sequence[int]) -> int:
        at = ROOT
        for token in tokens:
            child = self.tree.child(at, token)
            if child is None:
                return ROOT
            at = child
        return at

    def _below(self, parent: int, candidate: tuple[int, float]) -> int:
        child = self.tree.child(parent, candidate[0])
        return child if child is not None else self.tree.add(parent, [candidate])[0]
