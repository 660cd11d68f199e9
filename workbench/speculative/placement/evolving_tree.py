"""A draft tree that outlives its round: it grows while the target verifies, and is re-rooted by the verdict.

SwiftSpec (arXiv 2506.11309): the drafter expands its best leaves in batches of a fixed width, the target
takes the likeliest connected subtree of a budget, and of the outcome (accepted path and the target's own
token) what hangs below the newest token is kept, with its KV. A node's value is the logarithm of the product
of chances below the root; a child is never worth more than its parent and elders win among equals, so the
best nodes are a tree. Both sides hold one: the drafter's knows KV slots, the target's the drafter's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from workbench.engine.draft_seams import DraftTree
from workbench.spec.errors import InvariantError
from workbench.speculative.placement.messages import ROOT, TailNode


@dataclass(slots=True)
class Node:
    """``value``: logarithm of the product of chances since the tree started; ``slot``: where its KV is."""

    token: int
    parent: int
    pos: int
    chance: float
    value: float
    below: list[int] = field(default_factory=list)
    expanded: bool = False
    slot: int | None = None


@dataclass(frozen=True)
class Rerooted:
    """What a verdict did. ``slots``: of the old root and of each new token, None where no KV was written.

    ``hit``: the newest token was in the tree, so what hung below it lives on; ``matched``: tokens that were.
    """

    hit: bool
    matched: int
    slots: tuple[int | None, ...]
    kept: int
    dropped: int


@dataclass
class TreeStats:
    """Counts over the life of a tree. ``age``: verdicts since it last started anew."""

    rounds: int = 0
    hits: int = 0
    added: int = 0
    evicted: int = 0
    dropped: int = 0
    age: int = 0


class EvolvingTree:
    """One stream's tree below ``base_len`` committed ids.

    At most ``max_nodes`` nodes, none deeper than ``max_depth`` below the root. ``freed``: KV slots that
    nobody needs any more; whoever owns them takes them from there.
    """

    def __init__(self, base_len: int, *, max_nodes: int, max_depth: int = 64) -> None:
        if base_len < 1 or max_nodes < 1 or max_depth < 1:
            raise InvariantError(
                f"A tree of {max_nodes} nodes, {max_depth} deep, behind {base_len} ids cannot be."
            )
        self.base_len = base_len
        self.max_nodes, self.max_depth = max_nodes, max_depth
        self.nodes: dict[int, Node] = {}
        self.below: list[int] = []  # children of the root
        self.root_slot: int | None = None
        self.freed: list[int] = []
        self.stats = TreeStats()
        self._root_asked = False
        self._origin = 0.0
        self._next = 0

    # -- reading --------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.nodes)

    def children(self, node: int) -> list[int]:
        """Children in the order they were added."""
        return self.below if node == ROOT else self.nodes[node].below

    def child(self, node: int, token: int) -> int | None:
        """The child with this token."""
        return next((c for c in self.children(node) if self.nodes[c].token == token), None)

    def value(self, node: int) -> float:
        """Logarithm of the chance that all of a node's path below the root is accepted, as it was drafted."""
        return self.nodes[node].value - self._origin if node != ROOT else 0.0

    def position(self, node: int) -> int:
        """Absolute position of its token."""
        return self.nodes[node].pos if node != ROOT else self.base_len - 1

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child to the node itself."""
        out: list[int] = []
        while node != ROOT:
            out.append(node)
            node = self.nodes[node].parent
        return out[::-1]

    def tokens(self, node: int) -> list[int]:
        """Tokens of :meth:`path`."""
        return [self.nodes[n].token for n in self.path(node)]

    def best(self, budget: int) -> list[int]:
        """The ``budget`` nodes of the highest value, parents first: always a connected subtree."""
        return sorted(sorted(self.nodes, key=self._rank)[: max(budget, 0)], key=self._in_order)

    def draft(self, budget: int, source: str) -> DraftTree | None:
        """That subtree as a draft without laws; None when there is nothing in it."""
        chosen = self.best(budget)
        if not chosen:
            return None
        place = {ROOT: -1, **{n: i for i, n in enumerate(chosen)}}
        nodes = [self.nodes[n] for n in chosen]
        return DraftTree(
            tuple(n.token for n in nodes),
            tuple(place[n.parent] for n in nodes),
            source,
            confidence=tuple(math.exp(n.chance) for n in nodes),
        )

    def tail(self, nodes: Sequence[int]) -> tuple[TailNode, ...]:
        """These nodes as they are sent."""
        return tuple(
            TailNode(n, self.nodes[n].parent, self.nodes[n].pos, self.nodes[n].token, self.nodes[n].chance)
            for n in nodes
        )

    # -- growing --------------------------------------------------------------------------------------

    def frontier(self, width: int) -> list[int]:
        """At most ``width`` nodes to expand next, best first; the root alone while it has no children.

        A full tree goes on only where a child could be worth more than the leaf it would replace.
        """
        if not self.below:
            return [] if self._root_asked else [ROOT]
        deepest = self.base_len - 1 + self.max_depth
        open_ = [n for n, node in self.nodes.items() if not node.expanded and node.pos < deepest]
        if len(self.nodes) >= self.max_nodes:
            worst = self.value(self._worst())
            open_ = [n for n in open_ if self.value(n) > worst]
        return sorted(open_, key=self._rank)[:width]

    def fed(self, node: int, slot: int | None) -> None:
        """Its row was computed and its KV lies in ``slot``: children come next."""
        if node == ROOT:
            self.root_slot, self._root_asked = slot, True
        else:
            self.nodes[node].slot, self.nodes[node].expanded = slot, True

    def add(self, parent: int, candidates: Sequence[tuple[int, float]]) -> list[int]:
        """Children with the logarithms of their chances; the numbers of those that found a place."""
        made = [self._put(self._next, parent, token, chance) for token, chance in candidates]
        self._evict()
        return [n for n in made if n is not None and n in self.nodes]

    def adopt(self, node: TailNode) -> bool:
        """Add a node under its drafter's number; False where it does not fit this tree (see ``tails``)."""
        if node.id < 0 or not (node.parent == ROOT or node.parent in self.nodes):
            return False
        if node.pos != self.position(node.parent) + 1:
            return False
        if node.id in self.nodes:
            known = self.nodes[node.id]
            return (known.parent, known.token) == (node.parent, node.token)
        if self._put(node.id, node.parent, node.token, node.chance) is None:
            return False
        self._evict()
        return True

    # -- verdicts -------------------------------------------------------------------------------------

    def reroot(self, tokens: Sequence[int]) -> Rerooted:
        """``tokens`` (the accepted path and the target's own) were committed: the last is the new root."""
        if not tokens:
            raise InvariantError("A verdict without a token re-roots nothing.")
        at: int | None = ROOT
        slots = [self.root_slot]
        path: list[int] = []
        for token in tokens:
            at = self.child(at, token) if at is not None else None
            slots.append(self.nodes[at].slot if at is not None else None)
            if at is not None:
                path.append(at)
        hit = at is not None
        kept = set(self._under(path[-1])) if hit else set[int]()
        gone = [n for n in self.nodes if n not in kept and n not in path]
        self.freed += [s for n in gone if (s := self.nodes[n].slot) is not None]
        stats = self.stats
        stats.rounds += 1
        stats.hits += hit
        stats.dropped += len(gone)
        stats.age = stats.age + 1 if hit else 0
        if hit:
            new = self.nodes[path[-1]]
            self._origin, self.below = new.value, new.below
            for child in new.below:
                self.nodes[child].parent = ROOT
        else:
            self._origin, self.below = 0.0, []
        # A new root whose children were evicted is asked again: its KV is there, what follows it is not.
        self._root_asked = False
        self.root_slot = slots[-1]
        self.base_len += len(tokens)
        self.nodes = {n: node for n, node in self.nodes.items() if n in kept}
        return Rerooted(hit, len(path), tuple(slots), len(kept), len(gone))

    # -- inside -----------------------------------------------------------------------------------------

    def _put(self, number: int, parent: int, token: int, chance: float) -> int | None:
        pos = self.position(parent) + 1
        if pos > self.base_len - 1 + self.max_depth or self.child(parent, token) is not None:
            return None
        if not chance > -math.inf:  # what cannot follow, and NaN
            return None
        above = self.nodes[parent].value if parent != ROOT else self._origin
        chance = min(chance, 0.0)
        self.nodes[number] = Node(token, parent, pos, chance, above + chance)
        self.children(parent).append(number)
        self._next = max(self._next, number + 1)
        self.stats.added += 1
        return number

    def _evict(self) -> None:
        """Leaves worth least go until the tree fits, the oldest first among equals."""
        while len(self.nodes) > self.max_nodes:
            worst = self._worst()
            node = self.nodes.pop(worst)
            self.children(node.parent).remove(worst)
            if node.slot is not None:
                self.freed.append(node.slot)
            self.stats.evicted += 1

    def _worst(self) -> int:
        leaves = (n for n, node in self.nodes.items() if not node.below)
        return min(leaves, key=lambda n: (self.nodes[n].value, n))

    def _under(self, node: int) -> Iterator[int]:
        stack = list(self.nodes[node].below)
        while stack:
            n = stack.pop()
            yield n
            stack += self.nodes[n].below

    def _rank(self, node: int) -> tuple[float, int, int]:
        return (-self.nodes[node].value, self.nodes[node].pos, node)

    def _in_order(self, node: int) -> tuple[int, int]:
        return (self.nodes[node].pos, node)
