"""Mirror's drafter as the engine's ``drafter`` seam: a window, and a branch for every way it may end.

Mirror Speculative Decoding (arXiv 2510.13161), the algorithm alone: here the branches are made before the
target runs, where two devices would make them while it runs; :mod:`~workbench.speculative.placement.timeline`
says when each half would have been. Windows and branches are the drafter's likeliest tokens, so every exact
rule may judge them; the candidates are the drafter's own law, or that of a ``proxy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.speculative.placement.branches import Path, Rollout, RolloutStats, outcomes, roll_out
from workbench.speculative.placement.draft_stream import DraftStream
from workbench.speculative.placement.messages import ROOT
from workbench.speculative.placement.tree_kv import TreeKV

Proxy = Callable[[Sequence[int], Path], Sequence[int]]
"""Ids that may follow committed ids and a path, likeliest first: what the target would say, or nearly."""


@dataclass(frozen=True)
class MirrorStep:
    """One round. ``reused``: its window was a branch of the round before; ``foreseen``: the next one will be.

    ``window``: tokens of it; ``fresh_levels`` and ``branch_levels``: passes of the drafter's model one behind
    the other, for a window drafted afresh and for all branches; ``rows``: of both together.
    """

    seq: int
    reused: bool
    foreseen: bool
    window: int
    emitted: int
    fresh_levels: int
    branch_levels: int
    rows: int


class _Stream(DraftStream):
    """Chains below chosen nodes; what is known to follow a node is remembered while the node lives."""

    def __init__(self, kv: TreeKV, tokens: Sequence[int], gamma: int, kappa: int) -> None:
        nodes = gamma + (gamma + 1) * kappa * (gamma + 1)
        super().__init__(kv, tokens, top=kappa + 1, max_nodes=nodes, max_depth=2 * gamma + 1)
        self.ranked: dict[int, list[tuple[int, float]]] = {}
        self.pending: Rollout | None = None
        self.step: MirrorStep | None = None
        self.rows = 0

    def know(self, nodes: Sequence[int]) -> bool:
        """See to it that what follows these nodes is known; whether anything had to be fed."""
        new = [n for n in nodes if n not in self.ranked]
        if not new:
            return False
        logits, rows = self.feed_root() if new == [ROOT] else self.feed(new)
        self.rows += rows
        values, ids = logits.log_softmax(-1).topk(min(self.top, logits.shape[-1]))
        for node, tokens, chances in zip(new, ids.tolist(), values.tolist(), strict=True):
            pairs = zip(tokens, chances, strict=True)
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

    def put(self, parent: int, token: int) -> int:
        """The child with a token, as candidates of a proxy become nodes."""
        chances = dict(self.ranked.get(parent, ()))
        return self._below(parent, (token, chances.get(token, 0.0)))

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


class MirrorDrafter:
    """Windows of ``gamma`` tokens, ``kappa`` candidates at each of its ends."""

    name = "mirror"

    def __init__(self, kv: TreeKV, *, gamma: int, kappa: int, proxy: Proxy | None = None) -> None:
        self.max_draft = gamma
        self.kappa = kappa
        self.stats = RolloutStats()
        self.log: list[MirrorStep] = []
        self._kv = kv
        self._proxy = proxy
        self._streams: dict[int, _Stream] = {}

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """A sequence starts."""
        self._streams[seq] = _Stream(self._kv, tokens, self.max_draft, self.kappa)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """Each sequence's window: a branch of the last round, or a chain drafted now; then its branches."""
        return [self._propose(self._streams[c.seq], c) for c in contexts]

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """The verdict takes up a branch, or none."""
        stream = self._streams[seq]
        rollout, step = stream.pending, stream.step
        stream.pending = stream.step = None
        # A verdict that is the window's own beginning was cut by the end of the output.
        if rollout is not None and tuple(tokens) != rollout.window[: len(tokens)]:
            self.stats.count(rollout, len(tokens) - 1, tokens[-1])
        stream.settle(tokens)
        if step is not None:
            self.log.append(replace(step, emitted=len(tokens), foreseen=bool(stream.tree.below)))

    def forget(self, seq: int) -> None:
        """The sequence ended."""
        self._streams.pop(seq).close()

    def nbytes(self) -> int:
        """Bytes of its KV."""
        return self._kv.nbytes()

    def _propose(self, stream: _Stream, context: DraftContext) -> DraftTree | None:
        gamma = min(self.max_draft, context.room)
        deepest = len(stream.tokens) - 1 + 2 * self.max_draft + 1
        if gamma <= 0 or deepest >= self._kv.limit:
            return None
        stream.rows = 0
        window = stream.chain(gamma)
        hit, fresh = bool(window), 0
        if not hit:
            fresh = stream.extend([ROOT], gamma)[1]
            window = stream.chain(gamma)
        tokens = [stream.tree.nodes[n].token for n in window]
        levels = self._roll_out(stream, window, tokens)
        stream.step = MirrorStep(context.seq, hit, False, len(tokens), 0, fresh, levels, stream.rows)
        return DraftTree.chain(tokens, self.name)

    def _roll_out(self, stream: _Stream, window: list[int], tokens: list[int]) -> int:
        """Make all branches of a window; the levels this took."""
        places = [ROOT, *window]
        levels = sum(stream.know([place]) for place in places)

        def proxy(path: Path) -> Sequence[int]:
            if self._proxy is not None:
                return self._proxy(stream.tokens, path)
            return [token for token, _ in stream.ranked[places[len(path)]]]

        ends = outcomes(tokens, proxy, self.kappa)

        def extend(paths: Sequence[Path]) -> list[list[int]]:
            nonlocal levels
            heads = [stream.put(places[len(path) - 1], path[-1]) for path in paths]
            last, fed = stream.extend(heads, self.max_draft)
            levels += fed
            return [stream.tree.tokens(n)[len(path) :] for n, path in zip(last, paths, strict=True)]

        stream.pending = roll_out(tokens, ends, extend)
        return levels
