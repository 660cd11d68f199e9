"""What a drafter's model may draw from: the target's own processing, applied to the drafter's logits.

Mask, penalties, temperature and filters are those of the request, with the draft's own path, so that a draft
is proposed from the law family it will be judged in. Draws use noise of their own, fresh in every round: that
of the target's tokens, or of drafts that were discarded, would bias the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from workbench.engine.draft_seams import Pick
from workbench.engine.mask_errors import asking
from workbench.engine.processing import best, law, scores
from workbench.engine.sampling import PositionNoise
from workbench.engine.sequence import Sequence
from workbench.spec.errors import WorkbenchError


class RequestLaw:
    """:class:`workbench.engine.draft_seams.DraftLaw` of one sequence."""

    def __init__(self, seq: Sequence, vocab_size: int) -> None:
        self._seq = seq
        self._vocab = vocab_size

    @property
    def processed(self) -> bool:
        """Whether a mask or penalties change what is likeliest."""
        return self._seq.request.mask is not None or self._seq.params.penalised

    def pick(self, logits: Tensor, path: Seq[int], *, draws: bool, ids: Tensor | None = None) -> Pick | None:
        """What follows the drafted ids ``path`` by a drafter's ``logits``: of all ids, or of ``ids`` alone.

        None where the request's own mask fails: verification asks it again, and tells.
        """
        seq = self._seq
        try:
            scored, ids = self._scored(logits, path, ids)
            if seq.params.greedy or not draws:
                token = best(scored)[0]
                return Pick(token if ids is None else int(ids[token]), None)
            q = law(scored, seq.params)[0]
            q = q if ids is None else _spread(q, ids, self._vocab, 0.0)
            noise = PositionNoise(seq.params.seed, seq.sample, len(seq.tokens))
            return Pick(noise.draft(q, len(path)), q)
        except WorkbenchError:
            return None

    def top(
        self, logits: Tensor, path: Seq[int], k: int, *, ids: Tensor | None = None
    ) -> list[tuple[int, float]]:
        """The ``k`` likeliest tokens and the logarithms of their chances, likeliest first.

        At temperature 0 the chances are those of temperature 1, before the filters. Fewer where fewer are
        possible, none where the request's own mask fails.
        """
        params = self._seq.params
        try:
            scored, ids = self._scored(logits, path, ids)
            chances = scored.log_softmax(-1) if params.greedy else law(scored, params).log()
            values, places = chances[0].topk(min(k, chances.shape[-1]))
        except WorkbenchError:
            return []
        tokens = places if ids is None else ids[places]
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        return [(token, value) for token, value in pairs if math.isfinite(value)]

    def siblings(
        self, logits: Tensor, path: Seq[int], k: int, *, ids: Tensor | None = None
    ) -> tuple[list[int], Tensor] | None:
        """``k`` draws without replacement, and the law [V]: the largest of log q plus Gumbel noise.

        Kool et al., arXiv 1903.06059. None where the request's own mask fails.
        """
        seq = self._seq
        try:
            scored, ids = self._scored(logits, path, ids)
            q = law(scored, seq.params)[0]
        except WorkbenchError:
            return None
        q = q if ids is None else _spread(q, ids, self._vocab, 0.0)
        noise = PositionNoise(seq.params.seed, seq.sample, len(seq.tokens))
        return noise.drafts(q, len(path), k), q

    def _scored(self, logits: Tensor, path: Seq[int], ids: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Scores [1, n] of ``ids``, or of all where mask or penalties ask for each token's own place."""
        seq, mask, masks = self._seq, self._seq.request.mask, None
        if ids is not None and self.processed:
            logits, ids = _spread(logits, ids, self._vocab, -math.inf), None
        if mask is not None:
            with asking(mask):
                allowed = mask.allowed(seq.generated, path)
                if allowed is not None and not isinstance(allowed, Tensor):
                    raise TypeError(f"allowed() gave {type(allowed).__name__}, no tensor")
                masks = [allowed]
        return scores(logits[None], seq.params, seq.generated, [path], seq.request.prompt, masks), ids


def _spread(values: Tensor, ids: Tensor, vocab: int, rest: float) -> Tensor:
    """``values`` [n] at their ``ids`` of a vocabulary, ``rest`` elsewhere: [V]."""
    return torch.full((vocab,), rest, dtype=values.dtype, device=values.device).scatter_(0, ids, values)
