"""One stream of Mirror's drafter: chains below chosen nodes of its tree, and what is known to follow a node.

Mirror Speculative Decoding (arXiv 2510.13161). A window is the chain below the root; its branches hang below
its nodes, so that a verdict that was foreseen makes a branch the next window without a row fed again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from workbench.speculative.placement.draft_stream import DraftStream
from workbench.speculative.placement.messages import ROOT
from workbench.speculative.placement.tree_kv import Fed, TreeKV


class MirrorStream(DraftStream):
    """Chains below chosen nodes; what is known to follow a node is remembered while the node lives.

    ``ahead``: what the node's streams guess behind its likeliest child. Guesses are fed with that child, and
    those that the drafter then says itself become nodes: a pass makes one token of a chain, or several.
    """

    def __init__(self, kv: TreeKV, tokens: Sequence[int], gamma: int, kappa: int) -> None:
        nodes = gamma + (gamma + 1) * kappa * (gamma + 1)
        super().__init__(kv, tokens, top=kappa + 1, max_nodes=nodes, max_depth=2 * gamma + 1)
        self.ranked: dict[int, list[tuple[int, float]]] = {}
        self.ahead: dict[int, tuple[int, ...]] = {}
        self.rows = 0
        self.guessed = 0
        self.borne_out = 0

    def know(self, nodes: Sequence[int]) -> bool:
        """See to it that what follows these nodes is known; whether anything had to be fed."""
        new = [n for n in nodes if n not in self.ranked]
        if not new:
            return False
        fed, rows = self.feed_root() if new == [ROOT] else self.feed(new)
        self.rows += rows
        self._learn(new, fed)
        return True

    def step(self, ends: Sequence[int], left: Sequence[int]) -> tuple[list[int], list[int], bool]:
        """One pass: what of these ends is not known is fed, and each chain grows by all that is known then.

        ``left``: tokens that each may grow by at most. The new ends, what is left of each, and whether
        anything was fed.
        """
        grown = [self._follow(end, room) for end, room in zip(ends, left, strict=True)]
        short = [(end, room) for end, room in grown if room]
        if not short:
            return [end for end, _ in grown], [0] * len(grown), False
        if short[0][0] == ROOT:
            self.know([ROOT])
        else:
            self._feed_on(short)
        grown = [self._follow(end, room) for end, room in grown]
        return [end for end, _ in grown], [room for _, room in grown], True

    def extend(self, nodes: Sequence[int], length: int) -> tuple[list[int], int]:
        """The likeliest chain of ``length`` below each node: its last nodes, and the levels that were fed."""
        ends, left, levels = list(nodes), [length] * len(nodes), 0
        while any(left):
            ends, left, fed = self.step(ends, left)
            levels += fed
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
        known, ahead = (self.ranked.get(new[0]), self.ahead.get(new[0])) if new else (None, None)
        self.commit(tokens)
        self.ranked = {n: r for n, r in self.ranked.items() if n in self.tree.nodes}
        self.ahead = {n: a for n, a in self.ahead.items() if n in self.tree.nodes}
        if known is not None:
            self.ranked[ROOT], self.ahead[ROOT] = known, ahead or ()

    # -- inside -----------------------------------------------------------------------------------------

    def _follow(self, node: int, room: int) -> tuple[int, int]:
        """As far down the likeliest chain as it is known, its end's child included; what is left then.

        Nothing is left where nothing can follow: logits that are no numbers say nothing.
        """
        while room and (said := self.ranked.get(node)) is not None:
            if not said:
                return node, 0
            node, room = self._below(node, said[0]), room - 1
        return node, room

    def _feed_on(self, ends: Sequence[tuple[int, int]]) -> None:
        """Feed nodes, each with the chain that is guessed behind it; guesses that are borne out are nodes."""
        chains = [(node, self._guesses(node)[: room - 1]) for node, room in ends]
        slots = self.kv.take(sum(1 + len(guess) for _, guess in chains))
        tokens: list[int] = []
        positions: list[int] = []
        sees: list[list[int]] = []
        for node, guess in chains:
            seen, first = self.above(node), self.tree.position(node)
            for place, token in enumerate((self.tree.nodes[node].token, *guess)):
                seen = [*seen, slots[len(tokens)]]
                sees.append(seen)
                tokens.append(token)
                positions.append(first + place)
        fed = self.kv.feed(tokens, positions, slots, sees, len(tokens))
        self.rows += len(tokens)
        ranked = self._ranked(fed)
        at = 0
        for node, guess in chains:
            here, kept = node, 0
            for row in range(at, at + 1 + len(guess)):
                if row > at:
                    said = self.ranked[here][:1]
                    if not said or said[0][0] != tokens[row]:
                        break
                    here, kept = self._below(here, said[0]), kept + 1
                self.tree.fed(here, slots[row])
                self.ranked[here], self.ahead[here] = ranked[row], fed.ahead[row]
            self.kv.give(slots[at + 1 + kept : at + 1 + len(guess)])
            self.guessed += len(guess)
            self.borne_out += kept
            at += 1 + len(guess)

    def _guesses(self, node: int) -> tuple[int, ...]:
        """What its parent's streams guess behind it: nothing, unless it is what the parent says."""
        parent = self.tree.nodes[node].parent
        ranked = self.ranked.get(parent, [])
        said = bool(ranked) and ranked[0][0] == self.tree.nodes[node].token
        return self.ahead.get(parent, ()) if said else ()

    def _learn(self, nodes: Sequence[int], fed: Fed) -> None:
        for node, pairs, ahead in zip(nodes, self._ranked(fed), fed.ahead, strict=True):
            self.ranked[node], self.ahead[node] = pairs, ahead

    def _ranked(self, fed: Fed) -> list[list[tuple[int, float]]]:
        return [
            [(token, chance) for token, chance in pairs if math.isfinite(chance)]
            for pairs in self.kv.ranked(fed.logits, self.top)
        ]

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
