"""Rounds of speculation that are one program: what it is given, what it gives, and who takes part.

A *program* drafts, runs the target, judges and selects for B sequences at once, in shapes that depend on
nothing but B, the number of drafts and the length of a table. The host prepares ids, positions, tables and
noise, all of which it knows, and reads one tensor back; what a round wrote and said is then committed like
any other. Requests that a program cannot serve (masks, penalties, laws of too many tokens) take the ordinary
path of the same step, as prompts do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from workbench.engine.choose import token_infos
from workbench.engine.clock import PhaseClock
from workbench.engine.draft_runner import DraftRunner
from workbench.engine.draft_seams import DraftTree, Verdict
from workbench.engine.feature_runner import FeatureRunner
from workbench.engine.noise import Stream, uniforms
from workbench.engine.pages import NULL_PAGE
from workbench.engine.processing import not_finite
from workbench.engine.sampling import PositionNoise
from workbench.engine.scheduler import Batch
from workbench.engine.seams import SpanPlan
from workbench.engine.sequence import Sequence
from workbench.spec.errors import RequestError
from workbench.spec.events import TokenInfo

BUCKET = 256
"""Slots of the shortest table; longer ones double."""


class Noise(NamedTuple):
    """Of sequences that are sampled: settings [B, 1, 1] each, and the uniform numbers of their places.

    ``draft`` float64 [B, γ, V], ``coins`` [B, γ], ``token`` [B, γ + 1, V].
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    draft: Tensor
    coins: Tensor
    token: Tensor


class RoundInputs(NamedTuple):
    """B sequences of which ``newest`` int64 [B] is the position of the token that is not cached yet.

    ``window`` int64 [B, γ + 1]: the last ``have`` [B] committed tokens, that the drafter was not fed yet,
    then zeros; ``states`` [B, γ + 1, H] what it reads at them. ``room`` int64 [B] drafts at most, below 0
    where a row of the batch is empty. ``tables`` int64 [B, P] page ids by KV group. ``noise``: None at
    temperature 0.
    """

    window: Tensor
    have: Tensor
    newest: Tensor
    room: Tensor
    states: Tensor | None
    tables: tuple[Tensor, ...]
    noise: Noise | None


class RoundOutputs(NamedTuple):
    """``read`` float64 [B, 4γ + 3], all that the host reads: γ + 1 tokens, padded with -1; γ drafts; how many
    were accepted; whether all logits are finite; of each draft the expected acceptance and the drafter's
    chance (-1: it does not say). ``logits`` [B, γ + 1, V]; ``states`` [B, γ + 1, H] for the drafter."""

    read: Tensor
    logits: Tensor
    states: Tensor | None


class RoundProgram(Protocol):
    """One round of ``length`` drafts for each sequence."""

    name: str
    length: int
    top: int  # largest top-k of a request that it serves; 0: all of them

    def rule(self, *, greedy: bool) -> str:
        """Name of the rule that judges."""
        ...

    def __call__(self, inputs: RoundInputs) -> RoundOutputs:
        """Run it: writes K and V of both models, reads nothing back."""
        ...


@dataclass(frozen=True)
class RoundDone:
    """What one sequence comes out with; an error ends its request alone."""

    seq: Sequence
    span: SpanPlan
    tree: DraftTree
    verdict: Verdict
    infos: tuple[TokenInfo, ...]
    error: RequestError | None = None


class Rounds:
    """Runs ``program`` for the decodes of a step. ``reserve(seq, slots)`` makes slots writable, ``know(seq)``
    tells a drafter of a sequence; ``runner`` runs its layers elsewhere; ``ends`` end a request."""

    def __init__(
        self,
        program: RoundProgram,
        runner: DraftRunner,
        *,
        page_size: int,
        vocab_size: int,
        reserve: Callable[[Sequence, int], bool],
        know: Callable[[Sequence], None],
        ends: Collection[int] = (),
    ) -> None:
        self.program = program
        self._runner = runner
        self._page_size, self._vocab = page_size, vocab_size
        self._reserve, self._know, self._ends = reserve, know, ends

    def run(self, batch: Batch, step: int, clock: PhaseClock) -> list[RoundDone]:
        """Take the decodes that the program serves out of a batch, and run a round of them."""
        taken = [
            (seq, min(room, self.program.length))
            for seq, room in zip(batch.decodes, batch.room, strict=True)
            if room > 0 and self.serves(seq) and self._reserve(seq, seq.computed + 1 + room)
        ]
        if not taken:
            return []
        gone = {seq.id for seq, _ in taken}
        rest = [(s, r) for s, r in zip(batch.decodes, batch.room, strict=True) if s.id not in gone]
        batch.decodes, batch.room = [s for s, _ in rest], [r for _, r in rest]
        for seq, _ in taken:
            self._know(seq)
        inputs = self._inputs(taken)
        clock("prepare")
        out = self.program(inputs)
        rows = out.read.tolist()  # all that is read back
        clock("forward")
        done = [
            self._done(seq, room, row, logits, step)
            for (seq, room), row, logits in zip(taken, rows, out.logits, strict=False)
        ]
        for i, each in enumerate(done):
            states = None if out.states is None else out.states[i, : len(each.verdict.path) + 1]
            self._runner.fed_elsewhere(each.seq.id, each.seq.computed, states)
        clock("verify")
        return done

    def serves(self, seq: Sequence) -> bool:
        """Whether the program knows all that a request asks for."""
        p, top = seq.params, self.program.top
        if seq.siblings or seq.request.mask is not None or p.penalised:
            return False
        return p.greedy or not top or 0 < p.top_k <= top

    # -- inside ---------------------------------------------------------------------------------------

    def _inputs(self, taken: Seq[tuple[Sequence, int]]) -> RoundInputs:
        width = self.program.length + 1
        size = 1 << (len(taken) - 1).bit_length()
        device, empty = self._runner.device, size - len(taken)
        firsts = self._runner.behind([seq.id for seq, _ in taken], width)
        fresh = [(seq, first) for (seq, _), first in zip(taken, firsts, strict=True)]
        window = [s.tokens[f:] + [0] * (width - len(s.tokens) + f) for s, f in fresh]

        def column(numbers: list[int], rest: int) -> Tensor:
            return torch.tensor(numbers + [rest] * empty, device=device)

        states = None
        if isinstance(self._runner, FeatureRunner):
            rows = [self._runner.states(s.id, f, len(s.tokens)) for s, f in fresh]
            states = rows[0].new_zeros((size, width, rows[0].shape[1]))
            for i, row in enumerate(rows):
                states[i, : len(row)] = row
        greedy = all(seq.params.greedy for seq, _ in taken)
        return RoundInputs(
            window=torch.tensor(window + [[0] * width] * empty, device=device),
            have=column([len(s.tokens) - f for s, f in fresh], 1),
            newest=column([seq.computed for seq, _ in taken], 0),
            room=column([room for _, room in taken], -1),
            states=states,
            tables=self._tables([seq for seq, _ in taken], width, size),
            noise=None if greedy else self._noise([seq for seq, _ in taken], size),
        )

    def _tables(self, seqs: Seq[Sequence], width: int, size: int) -> tuple[Tensor, ...]:
        """Page ids, padded with the null page to a length that few rounds differ in."""
        most = max(seq.computed for seq in seqs) + width
        slots = BUCKET << max(0, (most - 1).bit_length() - BUCKET.bit_length() + 1)
        pages = -(-slots // self._page_size)
        out = []
        for g in range(len(seqs[0].tables)):
            rows = [(seq.tables[g] + [NULL_PAGE] * pages)[:pages] for seq in seqs]
            rows += [[NULL_PAGE] * pages] * (size - len(seqs))
            out.append(torch.tensor(rows, device=self._runner.device))
        return tuple(out)

    def _noise(self, seqs: Seq[Sequence], size: int) -> Noise:
        """Settings and noise; rows of the batch that are empty, and greedy ones, have none."""
        length, vocab = self.program.length, self._vocab
        draft, token = np.zeros((size, length, vocab)), np.zeros((size, length + 1, vocab))
        coins = np.zeros((size, length))
        settings = np.zeros((4, size, 1, 1))
        settings[2] = 1.0
        for i, seq in enumerate(seqs):
            p = seq.params
            if p.greedy:
                continue
            settings[:, i, 0, 0] = p.temperature, p.top_k, p.top_p, p.min_p
            noise = PositionNoise(p.seed, seq.sample, len(seq.tokens))
            for j in range(length + 1):
                token[i, j] = uniforms(noise.key(j, Stream.TOKEN), vocab)
                if j < length:
                    draft[i, j] = uniforms(noise.key(j, Stream.DRAFT), vocab)
                    coins[i, j] = noise.coin(j, 0)
        made = (torch.from_numpy(a).to(self._runner.device) for a in (*settings, draft, coins, token))
        return Noise(*made)

    def _done(self, seq: Sequence, room: int, row: list[float], logits: Tensor, step: int) -> RoundDone:
        """One sequence's share of what was read back.

        A program has no shorter shape for a draft with an end token: what it did behind that is left out.
        """
        length = self.program.length
        said, drafts, rest = row[: length + 1], row[length + 1 : 2 * length + 1], row[2 * length + 1 :]
        if not seq.params.ignore_eos:
            room = next((n for n, t in enumerate(drafts[:room], 1) if int(t) in self._ends), room)
        accepted, finite = min(int(rest[0]), room), rest[1] > 0
        expected, chances = rest[2 : 2 + length], rest[2 + length : 2 + 2 * length]
        tokens = [int(t) for t in said[: accepted + 1]]
        known = tuple(chances[:room]) if chances[0] >= 0 else ()
        tree = DraftTree(
            tuple(int(t) for t in drafts[:room]), tuple(range(-1, room - 1)), self.program.name, None, known
        )
        verdict = Verdict(
            tuple(range(accepted)),
            tokens[-1],
            accepted < room,
            tuple(expected[: min(accepted + 1, room)]),
            rule=self.program.rule(greedy=seq.params.greedy),
        )
        start = seq.computed
        span = SpanPlan(
            seq.id,
            (seq.tokens[-1], *tree.tokens),
            tuple(range(start, start + room + 1)),
            start,
            tuple(tuple(t) for t in seq.tables),
            room + 1,
            decodes=True,
        )
        infos = token_infos(seq, verdict, tokens, logits, step)
        return RoundDone(seq, span, tree, verdict, infos, None if finite else not_finite())
