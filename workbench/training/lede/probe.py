"""A drafter that drafts behind every exit, and a judge that judges all of it and keeps none.

The chains of all exits are the branches of one tree: one pass of the model says how many tokens of each it
would have accepted. The text goes on as without drafts, so that every place of it is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from workbench.engine.draft_seams import Coin, DraftContext, DraftTree, Sampler, Verdict
from workbench.engine.exit_control import ExitControl
from workbench.engine.exit_runner import ExitRunner
from workbench.spec.errors import InvariantError
from workbench.speculative.lede.state import Limits, Reading, read
from workbench.speculative.lede.walks import Chain, Place

Accepts = Callable[[int, int, int, int], bool]
"""``accepts(node, parent, depth, branch)``: whether a drafted node would be kept behind its parent."""


class Probe:
    """The ``drafter`` and the ``verify`` seam; ``texts`` are the places of each sequence, in order."""

    name = "probe"
    exact = True
    reuse = False

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.exit_layers = limits.exits[0]
        self.max_draft = len(limits.exits) * limits.longest
        self.texts: dict[int, list[Place]] = {}
        self._runner: ExitRunner | None = None
        self._open: dict[int, tuple[int, list[list[Reading]]]] = {}

    # -- the drafter -----------------------------------------------------------------------------------

    def attach(self, runner: ExitRunner) -> None:
        """How it runs the target's layers."""
        self._runner = runner

    def steer(self, control: ExitControl) -> None:
        """It drafts everything, whatever a control wants."""

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """A text begins."""
        self.texts[seq] = []

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """All chains of each sequence that has room for them, as a tree; None near the end of a text."""
        self._open.clear()
        fit = [i for i, c in enumerate(contexts) if c.room >= self.max_draft]
        chains = [self._chains([contexts[i] for i in fit], exit) for exit in self.limits.exits] if fit else []
        out: list[DraftTree | None] = [None] * len(contexts)
        for n, i in enumerate(fit):
            mine = [of_exit[n] for of_exit in chains]
            tokens = [t for ids, _, _ in mine for t in ids]
            long = self.limits.longest
            parents = [-1 if j % long == 0 else j - 1 for j in range(len(tokens))]
            laws = [law for _, _, laws in mine for law in laws]
            tree = DraftTree(tuple(tokens), tuple(parents), self.name, torch.stack(laws) if laws else None)
            self._open[id(tree)] = contexts[i].seq, [readings for _, readings, _ in mine]
            out[i] = tree
        return out

    def _chains(
        self, contexts: Sequence[DraftContext], exit: int
    ) -> list[tuple[list[int], list[Reading], list[Tensor]]]:
        """Tokens, readings and (where they are drawn) laws of a chain per sequence behind one exit."""
        if self._runner is None:
            raise InvariantError("The probe drafts before it has a runner.")
        self._runner.layers = exit
        out: list[tuple[list[int], list[Reading], list[Tensor]]] = [([], [], []) for _ in contexts]
        rows: list[tuple[int, list[int]]] = [(c.seq, []) for c in contexts]
        for _ in range(self.limits.longest):
            logits = self._runner.feed(rows)
            for context, row, reading, (ids, readings, laws) in zip(
                contexts, logits, read(logits), out, strict=True
            ):
                pick = context.law.pick(row, ids, draws=True) if context.law is not None else None
                if pick is None:
                    raise InvariantError("A text without a mask of its own can always go on.")
                ids.append(pick.token)
                readings.append(reading)
                laws.extend([pick.q] if pick.q is not None else [])
            rows = [(c.seq, [ids[-1]]) for c, (ids, _, _) in zip(contexts, out, strict=True)]
        return out

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """The text went on by a token."""

    def forget(self, seq: int) -> None:
        """It ended; its places stay."""

    def nbytes(self) -> int:
        """Streams that are kept during a step."""
        return self._runner.nbytes() if self._runner is not None else 0

    # -- the judge -------------------------------------------------------------------------------------

    def rule_for(self, tree: DraftTree, *, greedy: bool) -> str:
        """It judges each branch as it would be alone."""
        return "r1" if greedy else "r2"

    def greedy(self, tree: DraftTree, best: Sequence[int]) -> Verdict:
        """R1 on every branch."""
        self._log(tree, lambda node, parent, depth, i: tree.tokens[node] == best[parent + 1])
        return Verdict((), int(best[0]), False)

    def sampled(self, tree: DraftTree, p: Tensor, sample: Sampler, coin: Coin) -> Verdict:
        """R2 on every branch, with coins of its own."""
        q = tree.q
        if q is None:
            raise InvariantError("A probe above temperature 0 draws its drafts.")

        def accepts(node: int, parent: int, depth: int, i: int) -> bool:
            x = tree.tokens[node]
            return coin(depth, i) < float(p[parent + 1, x]) / float(q[node, x])

        self._log(tree, accepts)
        return Verdict((), sample(p[0], 0), False)

    def _log(self, tree: DraftTree, accepts: Accepts) -> None:
        seq, readings = self._open[id(tree)]
        chains = {}
        for i, (exit, law) in enumerate(zip(self.limits.exits, readings, strict=True)):
            first, n = i * self.limits.longest, 0
            while n < self.limits.longest and accepts(first + n, first + n - 1 if n else -1, n, i):
                n += 1
            chains[exit] = Chain(tuple(law), n)
        self.texts[seq].append(Place(chains))
