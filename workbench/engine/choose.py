"""From a step's logits to the tokens each sequence gains: verification and sampling.

Plain greedy rows take one batched argmax. Everything else goes through the law of its own position:
processed with the row's own path, drawn with the noise of its absolute position, so that batch mates,
chunking and drafting never change a seeded run.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from workbench.engine.clock import PhaseClock
from workbench.engine.processing import best, law, logprobs, scores
from workbench.engine.sampling import PositionNoise, check_alive, row_masks, row_paths
from workbench.engine.seams import DraftTree, SpanPlan, Verdict, Verify
from workbench.engine.sequence import Sequence
from workbench.spec.events import TokenInfo, TokenSource

Work = tuple[Sequence, SpanPlan, DraftTree | None]
Tokens = tuple[TokenInfo, ...]


class Chooser:
    """Decides tokens of one step; ``verdicts`` holds the outcome of each draft by sequence id."""

    def __init__(self, verify: Verify | None, vocab_size: int) -> None:
        self.verify = verify
        self.vocab_size = vocab_size
        self.verdicts: dict[int, Verdict] = {}

    def choose(
        self, logits: Tensor, work: Seq[Work], offsets: Seq[int], step: int, clock: PhaseClock
    ) -> list[list[Tokens]]:
        """Tokens per span: one entry for the sequence itself and one per sibling waiting for its prompt.

        ``logits`` [R, V]; span ``i`` owns ``span.logits`` rows from ``offsets[i]``. An empty list: nothing to sample yet.
        """
        self.verdicts = {}
        plain = [i for i, (seq, span, _) in enumerate(work) if span.logits and _plain(seq)]
        chosen: list[int] = torch.argmax(logits, dim=-1).tolist() if plain else []
        out: list[list[Tokens]] = []
        for i, (seq, span, tree) in enumerate(work):
            block = logits[offsets[i] : offsets[i] + span.logits]
            if seq.params.prompt_logprobs is not None:
                self._score_prompt(seq, span, block)
            n_draft = len(tree.tokens) if tree is not None else 0
            sampling = span.start + span.n_new - n_draft == len(seq.tokens) and seq.budget > 0
            if not sampling:
                out.append([])
                continue
            rows = block[len(block) - 1 - n_draft :]
            if _plain(seq):
                ids = chosen[offsets[i] + span.logits - 1 - n_draft : offsets[i] + span.logits]
                verdict = self.verify.greedy(tree, ids) if tree is not None and self.verify else None
                tokens = _tokens(seq, tree, verdict, ids[0])
            else:
                verdict, tokens = self._processed(seq, tree, rows, seq.sample)
            if verdict is not None:
                self.verdicts[seq.id] = verdict
            infos = [self._infos(seq, tree, verdict, tokens, rows, step)]
            for sibling in seq.siblings:
                first = [ids[0]] if _plain(seq) else self._processed(sibling, None, rows, sibling.sample)[1]
                infos.append(self._infos(sibling, None, None, first, rows, step))
            out.append(infos)
            clock("verify" if tree is not None else "sample")
        return out

    def rule(self, seq: Sequence) -> str:
        """Name of the verification rule in use."""
        return self.verify.name if self.verify is not None else ""

    # -- inside ---------------------------------------------------------------------------------------

    def _processed(
        self, seq: Sequence, tree: DraftTree | None, rows: Tensor, sample: int
    ) -> tuple[Verdict | None, list[int]]:
        """Verify or sample with penalties, masks and temperature of the rows' own paths."""
        paths = row_paths(tree)
        masks, dead = None, set[int]()
        if seq.request.mask is not None:
            masks, dead = row_masks(seq.request.mask, tree, seq.generated)
        scored = scores(rows, seq.params, seq.generated, paths, seq.request.prompt, masks)
        noise = PositionNoise(seq.params.seed, sample, len(seq.tokens))
        verdict: Verdict | None = None
        if seq.params.greedy:
            ids = best(scored)
            verdict = self.verify.greedy(tree, ids) if tree is not None and self.verify else None
            tokens = _tokens(seq, tree, verdict, ids[0])
        else:
            p = law(scored, seq.params)
            if tree is None or self.verify is None:
                tokens = [noise.token(p[0], 0)]
            else:
                verdict = self.verify.sampled(tree, p, noise.token, noise.coin)
                tokens = _tokens(seq, tree, verdict, verdict.token)
        check_alive(dead, verdict.path if verdict is not None else ())
        return verdict, tokens

    def _infos(
        self,
        seq: Sequence,
        tree: DraftTree | None,
        verdict: Verdict | None,
        tokens: list[int],
        rows: Tensor,
        step: int,
    ) -> Tokens:
        """Attach position, source and log-probabilities to chosen tokens."""
        scored = None
        if seq.params.logprobs is not None:
            at = [0, *(i + 1 for i in verdict.path)] if verdict is not None else [0]
            scored = logprobs(rows[at], tokens, seq.params.logprobs)
        out = []
        for j, token in enumerate(tokens):
            last = j == len(tokens) - 1
            source: TokenSource = "plain"
            if verdict is not None:
                source = "accepted" if not last else "corrected" if verdict.corrected else "bonus"
            value, top = scored[j] if scored is not None else (None, ())
            out.append(TokenInfo(token, len(seq.tokens) + j, source, step, value, top))
        return tuple(out)

    def _score_prompt(self, seq: Sequence, span: SpanPlan, block: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow this span's rows."""
        targets = [t for t in seq.request.prompt[span.start + 1 : span.start + span.logits + 1]]
        if not targets:
            return
        top = seq.params.prompt_logprobs or 0
        for j, scored in enumerate(logprobs(block[: len(targets)], targets, top)):
            seq.prompt_logprobs[span.start + 1 + j] = scored


def _plain(seq: Sequence) -> bool:
    return seq.params.plain_greedy and seq.request.mask is None


def _tokens(seq: Sequence, tree: DraftTree | None, verdict: Verdict | None, first: int) -> list[int]:
    if tree is None or verdict is None:
        return [first]
    return [*(tree.tokens[i] for i in verdict.path), verdict.token]
