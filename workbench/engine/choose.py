"""From a step's logits to the tokens each sequence gains: verification and sampling.

Plain greedy rows take one batched argmax. Everything else goes through the law of its own position:
processed with the row's own path, drawn with the noise of its absolute position, so that batch mates,
chunking and drafting never change a seeded run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from torch import Tensor

from workbench.engine.clock import PhaseClock
from workbench.engine.draft_seams import DraftTree, Verdict, Verify
from workbench.engine.mask_errors import asking
from workbench.engine.processing import best, law, leaders, logprobs, not_finite, scores
from workbench.engine.sampling import PositionNoise, check_alive, row_masks, row_paths
from workbench.engine.seams import LogitsMask, SpanPlan
from workbench.engine.sequence import Sequence
from workbench.spec.errors import OptionError, RequestError
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
    ) -> list[list[Tokens] | RequestError]:
        """Tokens per span: one entry for the sequence itself and one per sibling waiting for its prompt.

        ``logits`` [R, V]; span ``i`` owns ``span.logits`` rows from ``offsets[i]``. An empty list: nothing
        to sample yet. A :class:`RequestError` (a mask that allows nothing, logits that are not finite) ends
        that request alone.
        """
        self.verdicts = {}
        chosen: list[int] = []
        finite: list[bool] = []
        if any(span.logits and _plain(seq) for seq, span, _ in work):
            chosen, peaks = leaders(logits)
            finite = [math.isfinite(peak) for peak in peaks]
        out: list[list[Tokens] | RequestError] = []
        for i, (seq, span, tree) in enumerate(work):
            rows = slice(offsets[i], offsets[i] + span.logits)
            try:
                out.append(self._span(seq, span, tree, logits[rows], chosen[rows], all(finite[rows]), step))
            except RequestError as err:
                out.append(err)
            except OptionError as err:  # a rule that cannot judge this draft: others of the step may be fine
                out.append(RequestError(err.message, hint=err.hint))
            clock("verify" if tree is not None else "sample")
        return out

    def rule(self, tree: DraftTree, seq: Sequence) -> str:
        """Name of the rule that judged a draft."""
        return self.verify.rule_for(tree, greedy=seq.params.greedy) if self.verify is not None else ""

    # -- inside ---------------------------------------------------------------------------------------

    def _span(
        self,
        seq: Sequence,
        span: SpanPlan,
        tree: DraftTree | None,
        logits: Tensor,
        chosen: list[int],
        finite: bool,
        step: int,
    ) -> list[Tokens]:
        if seq.params.prompt_logprobs is not None:
            _score_prompt(seq, span, logits)
        n_draft = len(tree.tokens) if tree is not None else 0
        if span.start + span.n_new - n_draft < len(seq.tokens) or seq.budget == 0:
            return []
        rows = logits[len(logits) - 1 - n_draft :]
        plain = _plain(seq)
        verdict: Verdict | None = None
        if plain:
            if not finite:
                raise not_finite()
            ids = chosen[len(logits) - 1 - n_draft :]
            verdict = self.verify.greedy(tree, ids) if tree is not None and self.verify else None
            tokens = _tokens(tree, verdict, ids[0])
        else:
            verdict, tokens = self._processed(seq, tree, rows)
        if verdict is not None:
            self.verdicts[seq.id] = verdict
        out = [token_infos(seq, verdict, tokens, rows, step)]
        for sibling in seq.siblings:
            first = tokens[:1] if plain else self._processed(sibling, None, rows)[1]
            out.append(token_infos(sibling, None, first, rows, step))
        return out

    def _processed(
        self, seq: Sequence, tree: DraftTree | None, rows: Tensor
    ) -> tuple[Verdict | None, list[int]]:
        """Verify or sample with penalties, masks and temperature of the rows' own paths."""
        paths = row_paths(tree)
        masks, dead = None, set[int]()
        if seq.request.mask is not None:
            masks, dead = _ask(seq.request.mask, tree, seq.generated)
        scored = scores(rows, seq.params, seq.generated, paths, seq.request.prompt, masks)
        noise = PositionNoise(seq.params.seed, seq.sample, len(seq.tokens))
        verdict: Verdict | None = None
        if seq.params.greedy:
            ids = best(scored)
            verdict = self.verify.greedy(tree, ids) if tree is not None and self.verify else None
            tokens = _tokens(tree, verdict, ids[0])
        else:
            p = law(scored, seq.params)
            if tree is None or self.verify is None:
                tokens = [noise.token(p[0], 0)]
            else:
                verdict = self.verify.sampled(tree, p, noise.token, noise.coin)
                tokens = _tokens(tree, verdict, verdict.token)
        check_alive(dead, verdict.path if verdict is not None else ())
        return verdict, tokens


def token_infos(
    seq: Sequence,
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


def _ask(
    mask: LogitsMask, tree: DraftTree | None, generated: Seq[int]
) -> tuple[list[Tensor | None], set[int]]:
    """Masks of the rows; whatever goes wrong inside a request's own mask ends that request alone."""
    with asking(mask):
        return row_masks(mask, tree, generated)


def _score_prompt(seq: Sequence, span: SpanPlan, block: Tensor) -> None:
    """Log-probabilities of the prompt tokens that follow this span's rows."""
    targets = seq.request.prompt[span.start + 1 : span.start + span.logits + 1]
    if not targets:
        return
    top = seq.params.prompt_logprobs or 0
    for j, scored in enumerate(logprobs(block[: len(targets)], targets, top)):
        seq.prompt_logprobs[span.start + 1 + j] = scored


def _plain(seq: Sequence) -> bool:
    return seq.params.plain_greedy and seq.request.mask is None


def _tokens(tree: DraftTree | None, verdict: Verdict | None, first: int) -> list[int]:
    if tree is None or verdict is None:
        return [first]
    return [*(tree.tokens[i] for i in verdict.path), verdict.token]
