"""The drafter's side of one stream: committed ids, the tree below them, and the slots of both.

Whatever of the committed ids has no KV yet is fed before the tree grows: a whole prompt at first, one token
behind a verdict that nobody foresaw, nothing behind one that was.
"""

from __future__ import annotations

from collections.abc import Sequence

from workbench.spec.errors import InvariantError
from workbench.speculative.placement.evolving_tree import EvolvingTree, Rerooted
from workbench.speculative.placement.messages import ROOT
from workbench.speculative.placement.tree_kv import Fed, TreeKV

PIECE = 128
"""Rows of a prompt that are fed at a time."""


class DraftStream:
    """Grows a tree with ``kv``'s model: ``top`` children of each node that is expanded."""

    def __init__(
        self, kv: TreeKV, tokens: Sequence[int], *, top: int, max_nodes: int, max_depth: int
    ) -> None:
        self.kv = kv
        self.tokens = list(tokens)
        self.tree = EvolvingTree(len(self.tokens), max_nodes=max_nodes, max_depth=max_depth)
        self.top = top
        self._slots: list[int] = []  # of the committed tokens, the first ones; all but the newest few

    def batch(self, width: int) -> list[int]:
        """Nodes that the next :meth:`grow` expands; empty: there is nothing to do."""
        return [n for n in self.tree.frontier(width) if self.tree.position(n) < self.kv.limit - 1]

    def grow(self, width: int) -> tuple[list[int], int]:
        """Expand one batch: nodes that are new, and the rows that were fed for them."""
        batch = self.batch(width)
        if not batch:
            return [], 0
        fed, rows = self.feed_root() if batch == [ROOT] else self.feed(batch)
        made: list[int] = []
        for node, children in zip(batch, self.kv.ranked(fed.logits, self.top), strict=True):
            if node == ROOT or node in self.tree.nodes:  # not evicted by a sibling's children
                made += self.tree.add(node, children)
        self._collect()
        return [n for n in made if n in self.tree.nodes], rows

    def commit(self, tokens: Sequence[int]) -> Rerooted:
        """A verdict: accepted nodes keep their slots, as committed tokens."""
        done = self.tree.reroot(tokens)
        if len(self._slots) == len(self.tokens):
            self._slots.pop()  # the old root's: it is the first of those that come
        for slot in done.slots:
            if slot is None:
                break
            self._slots.append(slot)
        self.tokens += tokens
        self._collect()
        return done

    def feed_root(self) -> tuple[Fed, int]:
        """Feed the committed tokens that have no KV; the newest again where only its logits are missing.

        What is known behind the newest, and the rows this took.
        """
        if len(self._slots) == len(self.tokens):
            self.kv.give([self._slots.pop()])
        first = len(self._slots)
        while True:
            start, end = len(self._slots), min(len(self._slots) + PIECE, len(self.tokens))
            self._slots += self.kv.take(end - start)
            sees = [self._slots[: i + 1] for i in range(start, end)]
            fed = self.kv.feed(self.tokens[start:end], range(start, end), self._slots[start:], sees, 1)
            if end == len(self.tokens):
                break
        self.tree.fed(ROOT, self._slots[-1])
        return fed, end - first

    def feed(self, batch: Sequence[int]) -> tuple[Fed, int]:
        """Feed nodes of which no one is above another, all above them fed before; n rows."""
        slots = self.kv.take(len(batch))
        sees = [[*self.above(node), slot] for node, slot in zip(batch, slots, strict=True)]
        tokens = [self.tree.nodes[n].token for n in batch]
        fed = self.kv.feed(tokens, [self.tree.position(n) for n in batch], slots, sees, len(batch))
        for node, slot in zip(batch, slots, strict=True):
            self.tree.fed(node, slot)
        return fed, len(batch)

    def above(self, node: int) -> list[int]:
        """Slots of all that a node sees, itself left out. Raises :class:`InvariantError` where one lacks."""
        path = self.tree.path(node)[:-1]
        slots = [s for n in path if (s := self.tree.nodes[n].slot) is not None]
        if len(slots) != len(path):
            raise InvariantError("A node of the draft tree is expanded before its parent.")
        return [*self._slots, *slots]

    def close(self) -> None:
        """Give back everything."""
        self.kv.give([*self._slots, *self.tree.freed, *self._held()])
        self._slots, self.tree = [], EvolvingTree(1, max_nodes=1)

    def check(self) -> None:
        """Raise :class:`InvariantError` unless the slots in use are this stream's, each once."""
        held = [*self._slots, *self._held()]
        if len(set(held)) != len(held) or len(held) != self.kv.used:
            raise InvariantError(f"{len(held)} KV slots are held where {self.kv.used} are used.")

    # -- inside -----------------------------------------------------------------------------------------

    def _held(self) -> list[int]:
        return [n.slot for n in self.tree.nodes.values() if n.slot is not None]

    def _collect(self) -> None:
        self.kv.give(self.tree.freed)
        self.tree.freed = []
