"""One sequence's draft tree while its levels are fed: dynamic (EAGLE-2) or of a fixed form (EAGLE-1).

Every level feeds the expanded nodes before it again: rows of a draft see committed tokens and rows of their
own pass. A level of a small tree costs little more than its newest rows alone, and rows that were fed before
come out as they were.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.engine.feature_runner import Branch, Fed
from workbench.speculative.dynamic_tree import GrowingTree
from workbench.speculative.rank_tree import RankTree, tree_of
from workbench.speculative.recursive import conditional_laws

EAGLE_1 = tree_of(
    [
        *((a,) for a in range(4)),
        *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
        *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
        *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
    ]
)
"""The 25 nodes of EAGLE's released tree: 4, 8, 8, 3 and 2 per level, the likelier branches deeper."""


class Growth(Protocol):
    """A tree between two levels."""

    def answered(self, fed: Fed) -> None:
        """The rows of the nodes that were asked for, at first that of the newest committed token."""
        ...

    def expand(self) -> bool:
        """Choose the nodes whose children come next; false where there are none, or no slots for rows."""
        ...

    def branch(self) -> Branch:
        """Rows of all expanded nodes, the newest asked for."""
        ...

    def kept(self, name: str) -> DraftTree | None:
        """The draft, at the end."""
        ...


class Dynamic:
    """Grows where the head is confident: ``width`` nodes per level, ``nodes`` kept."""

    def __init__(self, context: DraftContext, ids: Tensor | None, width: int, nodes: int) -> None:
        self.context, self.ids, self.width = context, ids, width
        self.nodes = min(nodes, context.room)
        self.tree = GrowingTree()
        self._after: dict[int, Tensor] = {}  # the state behind the row of a node, -1: the newest token
        self._asked: list[int] = [-1]
        self._newest: list[int] = []

    def answered(self, fed: Fed) -> None:
        """Children of the nodes that were asked for."""
        law, self._newest = self.context.law, []
        for node, logits, state in zip(self._asked, fed.logits, fed.states, strict=True):
            self._after[node] = state
            if law is not None:
                best = law.top(logits, self.tree.path(node), self.width, ids=self.ids)
                self._newest += self.tree.add(node, best)

    def expand(self) -> bool:
        """The best of the newest nodes."""
        room = self.nodes - len(self.tree.expanded)  # rows beyond it have no slots
        self._asked = self.tree.frontier(self._newest, min(self.width, max(room, 0)))
        return bool(self._asked)

    def branch(self) -> Branch:
        """Rows of all expanded nodes."""
        tokens, parents = self.tree.fed()
        states = tuple(self._after[self.tree.parents[n]] for n in self.tree.expanded)
        return Branch(self.context.seq, tokens, states, parents, asked=len(self._asked))

    def kept(self, name: str) -> DraftTree | None:
        """The nodes worth most."""
        tokens, parents, values = self.tree.kept(self.nodes)
        if not tokens:
            return None
        chances = [math.exp(v - (values[p] if p >= 0 else 0.0)) for v, p in zip(values, parents, strict=True)]
        return DraftTree(tokens, parents, name, confidence=tuple(chances))


class Static:
    """A fixed form: node (..., r) is the r-th candidate behind its parent, by likelihood or as drawn.

    ``draws``: above temperature 0 siblings are drawn without replacement, with the law of each kept (R6).
    """

    def __init__(self, context: DraftContext, ids: Tensor | None, form: RankTree, draws: bool) -> None:
        self.context, self.ids = context, ids
        self.form = form.first(context.room)
        self.draws = draws and not context.greedy
        self.tokens: dict[int, int] = {}  # by node of the form; what has no token has no children either
        self._laws: dict[int, Tensor] = {}
        self._chances: dict[int, float] = {}
        self._after: dict[int, Tensor] = {}
        self._expanded: list[int] = []
        self._asked: list[int] = [-1]
        self._below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.form.parents):
            self._below.setdefault(parent, []).append(node)

    def answered(self, fed: Fed) -> None:
        """Tokens of the children of the nodes that were asked for."""
        for node, logits, state in zip(self._asked, fed.logits, fed.states, strict=True):
            self._after[node] = state
            self._fill(self._below.get(node, []), logits, self._path(node))

    def expand(self) -> bool:
        """The nodes of the next level that have children."""
        newest = [n for parent in self._asked for n in self._below.get(parent, ()) if n in self.tokens]
        self._asked = [n for n in newest if n in self._below]
        self._expanded += self._asked
        return bool(self._asked)

    def branch(self) -> Branch:
        """Rows of all expanded nodes."""
        place = {-1: -1, **{n: i for i, n in enumerate(self._expanded)}}
        parents = [self.form.parents[n] for n in self._expanded]
        return Branch(
            self.context.seq,
            tuple(self.tokens[n] for n in self._expanded),
            tuple(self._after[p] for p in parents),
            tuple(place[p] for p in parents),
            asked=len(self._asked),
        )

    def kept(self, name: str) -> DraftTree | None:
        """Every node that has a token."""
        nodes = sorted(self.tokens)
        if not nodes:
            return None
        place = {-1: -1, **{n: i for i, n in enumerate(nodes)}}
        return DraftTree(
            tuple(self.tokens[n] for n in nodes),
            tuple(place[self.form.parents[n]] for n in nodes),
            name,
            torch.stack([self._laws[n] for n in nodes]) if self._laws else None,
            () if self._laws else tuple(self._chances[n] for n in nodes),
        )

    def _fill(self, children: list[int], logits: Tensor, path: list[int]) -> None:
        law = self.context.law
        if law is None or not children:
            return
        most = 1 + max(self.form.ranks[n] for n in children)
        if self.draws:
            drawn = law.siblings(logits, path, most, ids=self.ids)
            if drawn is None:
                return
            laws = conditional_laws(drawn[1], drawn[0])
            for n in children:
                if self.form.ranks[n] < len(drawn[0]):
                    self.tokens[n], self._laws[n] = drawn[0][self.form.ranks[n]], laws[self.form.ranks[n]]
            return
        best = law.top(logits, path, most, ids=self.ids)
        for n in children:
            if self.form.ranks[n] < len(best):
                token, chance = best[self.form.ranks[n]]
                self.tokens[n], self._chances[n] = token, math.exp(chance)

    def _path(self, node: int) -> list[int]:
        out: list[int] = []
        while node >= 0:
            out.append(self.tokens[node])
            node = self.form.parents[node]
        return out[::-1]
