"""A draft head that reads the target's hidden states and drafts step by step: chain or dynamic tree.

What EAGLE-1, EAGLE-2 and EAGLE-3 share. The head's rows of committed tokens are computed once, from the
target's own states; behind the newest one it goes on with its own outputs. Its K and V lie in the target's
pages, so prefix hits, chunked prefill, copies and preemption hold for them as for the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree
from workbench.engine.feature_runner import Branch, FeatureRunner
from workbench.models.chain_program import ChainProgram, chain_program
from workbench.models.decoder import Decoder
from workbench.models.feature_decoder import FeatureDecoder
from workbench.models.weightset import Pack
from workbench.spec.errors import InvariantError
from workbench.speculative.fused.program import FusedChain
from workbench.speculative.growth import Growth


@dataclass(frozen=True)
class Net:
    """A head bound to its target: its layers, and how shown streams [n, H] become states [n, H].

    ``ids``: the tokens it drafts from, int64 [n], in the order of its logits; None: all.
    """

    decoder: FeatureDecoder
    fuse: Callable[[Sequence[Tensor]], Tensor]
    ids: Tensor | None


@dataclass(frozen=True)
class Drafts:
    """How it drafts: ``depth`` tokens ahead, ``largest`` in all. ``grow`` starts the tree of one sequence;
    None: a chain, which ``draws`` above temperature 0, and ends behind a token that the head gives, with all
    before it, less than ``confidence``."""

    depth: int
    largest: int
    draws: bool = True
    grow: Callable[[DraftContext, Tensor | None], Growth] | None = None
    confidence: float = 0.0


@dataclass
class Chain:
    """A chain while it is drafted: its tokens, the laws they were drawn from, the chance of all of it."""

    path: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    chance: float = 1.0

    def tree(self, name: str) -> DraftTree | None:
        """The draft, if there is one."""
        laws = torch.stack(self.laws) if self.laws else None
        return DraftTree.chain(self.path, name, laws) if self.path else None


class FeatureHead:
    """The ``drafter`` seam; needs a target and a runner before the first draft."""

    def __init__(
        self,
        name: str,
        drafts: Drafts,
        features: tuple[int, ...],
        layers: int,
        build: Callable[[Decoder, Pack], Net],
        bits: int = 16,
    ) -> None:
        self.name = name
        self.drafts = drafts
        self.features = features
        self.kv_layers = layers
        self.max_draft = drafts.largest
        self.bits = bits
        self._build = build
        self._net: Net | None = None
        self._runner: FeatureRunner | None = None
        self._program: ChainProgram | None = None
        self._own = 0

    def decoder(self, target: Decoder, pack: Pack) -> Decoder:
        """Its layers, on the target's embedding. Raises :class:`HeadMismatch` where they do not fit it."""
        self._net = self._build(target, pack)
        self._own = self._net.decoder.own_nbytes(target)
        return self._net.decoder

    def attach(self, runner: FeatureRunner) -> None:
        """How it runs its layers: where it can, a chain that needs no laws is one call."""
        self._runner = runner
        if self._net is not None and self.drafts.grow is None and runner.in_kernels:
            self._program = chain_program(self._net.decoder, self._net.ids)

    @property
    def chain_obstacle(self) -> str:
        """Why its drafts are no chains of one length, as a remedy; empty where they are."""
        if self.drafts.grow is not None:
            return "Set width to 1: the program drafts chains, which have one shape."
        if self.drafts.confidence:
            return "Set confidence to 0: all chains of the program are of one length."
        return "" if self.kv_layers == 1 else "Choose a model with one module: the program runs one layer."

    def fused_chain(self) -> FusedChain:
        """What a round is made of that is one program; only without a :attr:`chain_obstacle`."""
        net, _ = self._parts()
        depth, draws = self.drafts.depth, self.drafts.draws
        return FusedChain(self.name, net.decoder, depth, draws, net.ids, self.features, net.fuse)

    def begin(self, seq: int, tokens: Sequence[int]) -> None:
        """The runner knows what is written; the rest it is shown."""

    def observe(self, seq: int, start: int, features: Sequence[Tensor]) -> None:
        """States of what was committed."""
        net, runner = self._parts()
        runner.show(seq, start, net.fuse(features))

    def fork(self, seq: int, child: int) -> None:
        """The runner has them."""
        self._parts()[1].fork(seq, child)

    def propose(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        """All sequences together, one pass per level."""
        out: list[DraftTree | None] = [None] * len(contexts)
        asked = [i for i, c in enumerate(contexts) if c.room > 0 and c.law is not None]
        if asked:
            chosen = [contexts[i] for i in asked]
            made = self._chains(chosen) if self.drafts.grow is None else self._trees(chosen, self.drafts.grow)
            for i, tree in zip(asked, made, strict=True):
                out[i] = tree
        return out

    def _chains(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None]:
        at_once = self._at_once(contexts)
        if at_once is not None:
            return at_once
        net, runner = self._parts()
        chains = [Chain() for _ in contexts]
        live = list(range(len(contexts)))
        fed = runner.catch_up([c.seq for c in contexts])
        while live:
            branches, go_on = [], []
            for i, answer in zip(live, fed, strict=True):
                if self._extend(contexts[i], answer.logits[0], chains[i], net.ids):
                    go_on.append(i)
                    path = chains[i].path
                    branches.append(
                        Branch(contexts[i].seq, (path[-1],), (answer.states[0],), written=len(path) - 1)
                    )
            live = go_on
            fed = runner.draft(branches) if live else []
        return [chain.tree(self.name) for chain in chains]

    def _at_once(self, contexts: Sequence[DraftContext]) -> list[DraftTree | None] | None:
        """Chains of the head's likeliest tokens in one call; None where the kernels or a request's law ask
        for single steps."""
        _, runner = self._parts()
        drafts = self.drafts
        plain = all(c.greedy or not drafts.draws for c in contexts)
        if self._program is None or not plain or any(c.law is None or c.law.processed for c in contexts):
            return None
        asks = [(c.seq, min(drafts.depth, c.room)) for c in contexts]
        paths = runner.chains(self._program, asks, drafts.confidence)
        return None if paths is None else [DraftTree.chain(p, self.name) if p else None for p in paths]

    def _extend(self, context: DraftContext, logits: Tensor, chain: Chain, ids: Tensor | None) -> bool:
        """Append what follows; whether the draft goes on behind it."""
        law, drafts = context.law, self.drafts
        pick = law.pick(logits, chain.path, draws=drafts.draws, ids=ids) if law is not None else None
        if pick is None:
            return False
        chain.path.append(pick.token)
        if pick.q is not None:
            chain.laws.append(pick.q)
        if len(chain.path) >= min(drafts.depth, context.room):
            return False
        if not drafts.confidence:
            return True
        # A token that was drawn stays, however unlikely: dropping it would bias what is verified.
        if pick.q is not None:
            chain.chance *= float(pick.q[pick.token])
        else:
            chain.chance *= math.exp(float(logits.max() - logits.logsumexp(-1)))
        return chain.chance >= drafts.confidence

    def _trees(
        self, contexts: Sequence[DraftContext], grow: Callable[[DraftContext, Tensor | None], Growth]
    ) -> list[DraftTree | None]:
        net, runner = self._parts()
        growing = [grow(c, net.ids) for c in contexts]
        for g, answer in zip(growing, runner.catch_up([c.seq for c in contexts]), strict=True):
            g.answered(answer)
        for _ in range(1, self.drafts.depth):
            live = [g for g in growing if g.expand()]
            if not live:
                break
            for g, answer in zip(live, runner.draft([g.branch() for g in live]), strict=True):
                g.answered(answer)
        return [g.kept(self.name) for g in growing]

    def _parts(self) -> tuple[Net, FeatureRunner]:
        if self._net is None or self._runner is None:
            raise InvariantError(f"{self.name} drafts before it has a target.")
        return self._net, self._runner

    def commit(self, seq: int, tokens: Sequence[int]) -> None:
        """The runner is told by the engine."""

    def forget(self, seq: int) -> None:
        """The runner is told by the engine."""

    def nbytes(self) -> int:
        """Bytes of the head beside its target, and of states it was shown; its KV counts with the pages."""
        return self._own + (self._runner.nbytes() if self._runner is not None else 0)
