"""The target's side of the tree: what of the drafter's stream is taken, and what of it is verified next.

Nothing made for another number of committed ids is taken, nor what hangs below an unknown node, nor what says
another position than its place: each refusal is counted by its reason. What was taken hangs below the
committed ids it was drafted for, and lives on through :meth:`TailBook.commit` as the drafter's own tree does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from workbench.engine.draft_seams import DraftTree
from workbench.speculative.placement.evolving_tree import EvolvingTree
from workbench.speculative.placement.messages import DraftSync, TailStream, VerifyCommit


class TailBook:
    """One stream: committed ids, and the tree the target knows. ``vocab``: ids there are; 0: any."""

    def __init__(
        self, stream: int, tokens: Sequence[int], *, max_nodes: int, max_depth: int = 64, vocab: int = 0
    ) -> None:
        self.stream = stream
        self.tokens = list(tokens)
        self.tree = EvolvingTree(len(self.tokens), max_nodes=max_nodes, max_depth=max_depth)
        self.refused: Counter[str] = Counter()
        self.taken = 0
        self._vocab = vocab

    def sync(self) -> DraftSync:
        """What tells the drafter to start."""
        return DraftSync(self.stream, tuple(self.tokens))

    def receive(self, tail: TailStream) -> int:
        """Take the nodes that fit; their number."""
        if tail.stream != self.stream:
            return self._refuse("stream", len(tail.nodes))
        if tail.base_len != len(self.tokens):
            return self._refuse("stale" if tail.base_len < len(self.tokens) else "ahead", len(tail.nodes))
        before = self.taken
        for node in tail.nodes:
            if node.token < 0 or (self._vocab and node.token >= self._vocab):
                self._refuse("token", 1)
            elif node.id in self.tree.nodes:  # sent again behind a verdict, to be sure
                self.refused["known"] += 1
            elif self.tree.adopt(node):
                self.taken += 1
            else:
                self._refuse("place", 1)
        return self.taken - before

    def draft(self, budget: int, source: str) -> DraftTree | None:
        """The subtree to verify next."""
        return self.tree.draft(budget, source)

    def commit(self, tokens: Sequence[int]) -> VerifyCommit:
        """These ids became final: what the drafter is told."""
        told = VerifyCommit(self.stream, len(self.tokens), tuple(tokens))
        self.tokens += tokens
        self.tree.reroot(tokens)
        return told

    def _refuse(self, why: str, nodes: int) -> int:
        self.refused[why] += nodes
        return 0
