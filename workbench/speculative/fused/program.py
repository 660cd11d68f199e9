"""Draft loop, target pass, judgement and selection as one program of fixed shapes.

The fused speculation of AWS' Neuron (NxD Inference, ``enable_fused_speculation``): draft steps are unrolled,
shapes never change, positions and lengths are tensors that masks are made of, rejected places are filled
with a sentinel, and K and V of both models go to fixed places of fixed tables: what lies behind the accepted
tokens is written over by the next round. Nothing branches on a number that the device holds, so that a
compiler takes the whole (``torch.compile(fullgraph=True)``), and the host waits once, for tokens and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.executor import Executor
from workbench.engine.pages import NULL_PAGE
from workbench.engine.rounds import Noise, RoundInputs, RoundOutputs
from workbench.engine.seams import FixedAttention, FixedRead
from workbench.models.decoder import Decoder
from workbench.models.opaque import opaque_decoder
from workbench.spec.errors import InvariantError
from workbench.speculative.fused.accept import Judged, match, padded, reject
from workbench.speculative.fused.laws import Settings, TopLaw, chance, draw, greedy_tokens, top_law

MANY = 1 << 20


@dataclass(frozen=True)
class FusedChain:
    """What a drafter of chains of one length is made of: ``decoder`` runs ``length`` times per round.

    ``fuse``: from the target's streams that enter the layers ``features`` to states, for heads that read
    some. ``ids`` int64 [n]: the tokens it drafts from, in the order of its logits. ``draws``: it samples.
    """

    name: str
    decoder: Decoder
    length: int
    draws: bool
    ids: Tensor | None = None
    features: tuple[int, ...] = ()
    fuse: Callable[[Sequence[Tensor]], Tensor] | None = None


class FusedRound:
    """:class:`~workbench.engine.rounds.RoundProgram` of a target and a drafter on the same pages.

    ``target`` and ``drafter`` hold the decoders and their KV layers; those of the drafter lie in the target's
    KV group ``home``. Positions end below ``context``. ``top``: tokens that sampled laws keep (0: all).
    ``backend`` of ``torch.compile``, or None: its operations one by one.
    """

    def __init__(
        self,
        chain: FusedChain,
        target: Executor,
        drafter: Executor,
        *,
        home: int,
        context: int,
        top: int = 0,
        backend: str | Callable[..., Any] | None = None,
    ) -> None:
        self.name, self.length, self.top = chain.name, chain.length, top
        self._chain, self._home, self._highest = chain, home, context - 1
        self._target, self._drafter = target, drafter
        self._models = target.decoder, chain.decoder
        self._vocab = target.decoder.config.vocab_size
        self._run: Callable[[RoundInputs], RoundOutputs] = self.round
        self._compiled = backend is not None
        if backend is not None:
            self._models = opaque_decoder(target.decoder), opaque_decoder(chain.decoder)
            for model in self._models:
                model.reserve(context)  # a table that grows would be another program
            self._run = torch.compile(self.round, fullgraph=True, dynamic=False, backend=backend)

    def rule(self, *, greedy: bool) -> str:
        """R1 at temperature 0; above it R2 for drafts that were drawn, R3 for others."""
        return "r1" if greedy else "r2" if self._chain.draws else "r3"

    def __call__(self, inputs: RoundInputs) -> RoundOutputs:
        """One round; see :class:`~workbench.engine.rounds.RoundProgram`."""
        if not self._compiled:
            return self.round(inputs)
        # One graph per shape, of which there are few (batch sizes and table lengths are powers of two).
        with torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY):
            return self._run(inputs)

    def round(self, x: RoundInputs) -> RoundOutputs:
        """The program itself."""
        settings = None if x.noise is None else Settings(*x.noise[:4])
        end = x.newest + 1 + x.room
        drafts, laws = self._drafts(x, settings, end)
        chain = self._chain
        rows = torch.cat((x.window.gather(1, x.have[:, None] - 1), drafts), 1)
        logits, captured = self._pass(
            self._models[0], self._target, x.tables, rows, x.newest, end, capture=chain.features
        )
        states = None
        if chain.fuse is not None:
            shown = [captured[layer].flatten(0, 1) for layer in chain.features]
            states = chain.fuse(shown).view(*rows.shape, -1)
        judged = self._judge(logits, drafts, laws, x, settings)
        wanted = torch.arange(rows.shape[1], device=rows.device) <= x.room[:, None]
        finite = (logits.amax(-1).isfinite() | ~wanted).all(1)
        unknown = judged.expected.new_full(drafts.shape, -1.0)
        read = torch.cat(
            (
                padded(drafts, judged).double(),
                drafts.double(),
                judged.accepted[:, None].double(),
                finite[:, None].double(),
                judged.expected,
                unknown if laws is None else chance(laws, drafts),
            ),
            1,
        )
        return RoundOutputs(read, logits, states)

    def _drafts(self, x: RoundInputs, settings: Settings | None, end: Tensor) -> tuple[Tensor, TopLaw | None]:
        """Drafts int64 [B, γ], and the laws they were drawn from, if they were."""
        logits, behind = self._feed(x, x.window, x.newest + 1 - x.have, end, x.states)
        newest = x.have[:, None, None] - 1
        logits = logits.gather(1, newest.expand(-1, 1, logits.shape[2]))
        state = behind.gather(1, newest.expand(-1, 1, behind.shape[2]))
        tokens: list[Tensor] = []
        laws: list[TopLaw] = []
        for step in range(self.length):
            token = self._pick(logits, settings, x.noise, step, laws)
            tokens.append(token)
            if step + 1 < self.length:
                given = state if self._chain.fuse is not None else None
                logits, state = self._feed(x, token, x.newest + 1 + step, end, given)
        q = TopLaw(torch.cat([y.ids for y in laws], 1), torch.cat([y.p for y in laws], 1)) if laws else None
        return torch.cat(tokens, 1), q

    def _pick(
        self, logits: Tensor, settings: Settings | None, noise: Noise | None, step: int, laws: list[TopLaw]
    ) -> Tensor:
        """The next draft int64 [B, 1] of ``logits`` [B, 1, W]; its law joins ``laws`` where it was drawn."""
        ids = self._chain.ids
        if settings is None or noise is None or not self._chain.draws:
            token = greedy_tokens(logits)
            return token if ids is None else ids[token]
        law = top_law(logits, settings, self.top or MANY)
        law = law if ids is None else TopLaw(ids[law.ids], law.p)
        laws.append(law)
        return draw(law, noise.draft[:, step : step + 1])

    def _judge(
        self, logits: Tensor, drafts: Tensor, laws: TopLaw | None, x: RoundInputs, settings: Settings | None
    ) -> Judged:
        if settings is None or x.noise is None:
            return match(drafts, greedy_tokens(logits), x.room, None)
        p = top_law(logits, settings, self.top or MANY)
        if laws is not None:
            return reject(drafts, p, laws, x.room, x.noise.coins, x.noise.token, self._vocab)
        head = TopLaw(p.ids[:, : self.length], p.p[:, : self.length])
        return match(drafts, draw(p, x.noise.token), x.room, chance(head, drafts))

    def _feed(
        self, x: RoundInputs, ids: Tensor, first: Tensor, end: Tensor, states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The drafter's logits [B, R, W] and what leaves its last layer [B, R, H]."""
        table = (x.tables[self._home],)
        decoder, layers = self._models[1], self._chain.decoder.config.num_layers
        logits, captured = self._pass(
            decoder, self._drafter, table, ids, first, end, capture=(layers,), states=states
        )
        return logits, captured[layers]

    def _pass(
        self,
        decoder: Decoder,
        executor: Executor,
        tables: Sequence[Tensor],
        ids: Tensor,
        first: Tensor,
        end: Tensor,
        *,
        capture: tuple[int, ...],
        states: Tensor | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Rows ``ids`` [B, R] at the positions from ``first`` [B] on: logits [B, R, V], streams [B, R, H].

        K and V of positions from ``end`` [B] on, which nobody will see, go to the null page.
        """
        batch, rows = ids.shape
        at = first[:, None] + torch.arange(rows, device=ids.device)
        reads: list[FixedRead] = []
        places: list[Tensor] = []
        op = executor.op
        if not isinstance(op, FixedAttention):
            raise InvariantError(f"The attention {op.name} has no fixed form.")
        real = at < end[:, None]
        for table, shape, store in zip(tables, executor.shapes, executor.stores, strict=True):
            size, heads = shape.page_size, shape.kv_heads
            pages = table.gather(1, (at // size).clamp_max(table.shape[1] - 1))
            pages = torch.where(real, pages, NULL_PAGE)
            noted = torch.where(real, at, -1).to(store.positions.dtype)
            store.positions.index_copy_(0, (pages * size + at % size).flatten(), noted.flatten())
            head = torch.arange(heads, device=ids.device)
            rows_of = (pages[..., None] * heads + head) * size + (at % size)[..., None]
            places.append(rows_of.flatten())
            reads.append(op.fixed(table, first, rows, shape))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            (part,) = executor.parts[layer]
            planes = executor.stores[part.group].planes
            keys, values = planes["k"][part.local], planes["v"][part.local]
            for plane, new in ((keys, k), (values, v)):
                flat = new.to(plane.dtype).reshape(-1, new.shape[-1])
                plane.view(-1, new.shape[-1]).index_copy_(0, places[part.group], flat)
            return reads[part.group](q, keys, values)

        out = decoder.forward(
            ids.flatten(),
            at.clamp_max(self._highest).flatten(),
            attend,
            capture=capture,
            states=None if states is None else states.flatten(0, 1),
            highest=self._highest,
        )
        captured = {layer: stream.view(batch, rows, -1) for layer, stream in out.captured.items()}
        return out.logits.view(batch, rows, -1), captured
