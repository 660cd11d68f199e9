"""Mirror's drafter as the engine's ``drafter`` seam: a window, and a branch for every way it may end.

Mirror Speculative Decoding (arXiv 2510.13161), the algorithm alone: here the branches are made before the
target runs, where two devices would make them while it runs; :mod:`~workbench.speculative.placement.timeline`
says when each half would have been. Windows and branches are the drafter's likeliest tokens, so every exact
rule may judge them; the candidates are the drafter's own law, or that of a ``proxy``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.speculative.placement.branches import Path, Rollout, RolloutStats, outcomes, roll_out
from workbench.speculative.placement.messages import ROOT
from workbench.speculative.placement.mirror_stream import MirrorStream
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
        self._streams: dict[int, MirrorStream] = {}
        self._pending: dict[int, Rollout] = {}
        self._steps: dict[int, MirrorStep] = {}

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """A sequence starts."""
        self._streams[seq] = MirrorStream(self._kv, tokens, self.max_draft, self.kappa)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """Each sequence's window: a branch of the last round, or a chain drafted now; then its branches."""
        return [self._propose(self._streams[c.seq], c) for c in contexts]

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """The verdict takes up a branch, or none."""
        stream = self._streams[seq]
        rollout, step = self._pending.pop(seq, None), self._steps.pop(seq, None)
        # A verdict that is the window's own beginning was cut by the end of the output.
        if rollout is not None and tuple(tokens) != rollout.window[: len(tokens)]:
            self.stats.count(rollout, len(tokens) - 1, tokens[-1])
        stream.settle(tokens)
        if step is not None:
            self.log.append(replace(step, emitted=len(tokens), foreseen=bool(stream.tree.below)))

    def forget(self, seq: int) -> None:
        """The sequence ended."""
        self._streams.pop(seq).close()
        self._pending.pop(seq, None)
        self._steps.pop(seq, None)

    def nbytes(self) -> int:
        """Bytes of its KV."""
        return self._kv.nbytes()

    def _propose(self, stream: MirrorStream, context: DraftContext) -> DraftTree | None:
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
        self._pending[context.seq], levels = self._roll_out(stream, window, tokens)
        self._steps[context.seq] = MirrorStep(
            context.seq, hit, False, len(tokens), 0, fresh, levels, stream.rows
        )
        return DraftTree.chain(tokens, self.name)

    def _roll_out(self, stream: MirrorStream, window: list[int], tokens: list[int]) -> tuple[Rollout, int]:
        """Make all branches of a window, and the levels this took."""
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

        return roll_out(tokens, ends, extend), levels
