"""What a drafter's model may draw from: the target's own processing, applied to the drafter's logits.

Mask, penalties, temperature and filters are those of the request, with the draft's own path, so that a draft
is proposed from the law family it will be judged in. Draws use the noise of their position in a stream of
their own: shared with the target's noise, drafts would bias the output.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from workbench.engine.draft_seams import Pick
from workbench.engine.processing import best, law, scores
from workbench.engine.sampling import PositionNoise
from workbench.engine.sequence import Sequence


class RequestLaw:
    """:class:`workbench.engine.draft_seams.DraftLaw` of one sequence."""

    def __init__(self, seq: Sequence) -> None:
        self._seq = seq

    def pick(self, logits: Tensor, path: Seq[int], *, draws: bool) -> Pick | None:
        """What follows the drafted ids ``path`` by a drafter's ``logits`` [V].

        None where the request's own mask fails: verification asks it again, and tells.
        """
        seq = self._seq
        try:
            masks = None
            if seq.request.mask is not None:
                masks = [seq.request.mask.allowed(seq.generated, path)]
            scored = scores(logits[None], seq.params, seq.generated, [path], seq.request.prompt, masks)
            if seq.params.greedy or not draws:
                return Pick(best(scored)[0], None)
            q = law(scored, seq.params)[0]
            noise = PositionNoise(seq.params.seed, seq.sample, len(seq.tokens))
            return Pick(noise.draft(q, len(path)), q)
        except Exception:
            return None
