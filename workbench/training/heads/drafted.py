"""What a drafter is worth on held-out conversations, teacher-forced: step by step, and by sampling.

``hit[j]`` at a root is whether the j-th drafted token, all before it right, would be the target's own. Greedy
answers count for that, because there the right tokens are the target's likeliest; the overlap Σ min(p, q),
which is how often a sampled draft is taken at temperature 1, is over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.progress import Cancel, check_cancel
from workbench.training.heads.eagle import EagleLoss
from workbench.training.heads.rows import Shown
from workbench.training.heads.unroll import Batch

TOGETHER = 16


def drafted(
    loss: EagleLoss,
    shown: Sequence[Shown],
    steps: int,
    *,
    overlap: bool = True,
    cancel: Cancel | None = None,
) -> dict[str, Any]:
    """Shares by step: ``full`` (this and all steps before it right), ``conditional`` (right if those were).

    ``chain``: 1 + Σ full, what a greedy chain of so many would give per step. ``alpha``: mean Σ min(p, q) by
    step against the target's whole law. ``covered``: rows whose likeliest token can be drafted.
    """
    hits = torch.zeros(steps, dtype=torch.float64)
    roots = torch.zeros(steps, dtype=torch.float64)
    shared, rows = torch.zeros(steps, dtype=torch.float64), torch.zeros(steps, dtype=torch.float64)
    covered = [0, 0]
    for begin in range(0, len(shown), TOGETHER):
        check_cancel(cancel, "Measuring the head")
        batch = Batch.of(shown[begin : begin + TOGETHER])
        with torch.no_grad():
            given, target = loss.run(batch, steps)
            best = batch.best()
            law = _law(loss, target) if overlap else target
            covered[0] += int((loss.place[best] >= 0).sum())
            covered[1] += len(best)
            greedy = torch.cat(
                [
                    torch.full((len(s.conversation.ids) - s.conversation.answer - 1,), s.conversation.greedy)
                    for s in batch.shown
                ]
            )
            right = torch.ones(len(best), dtype=torch.bool)
            for j, a in enumerate(given):
                logits = F.linear(loss.model.outlet(a).to(loss.matrix.dtype), loss.matrix).to(a.dtype)
                counted = batch.ahead >= j
                # row n of step j ends the chain whose root is j rows before it
                right = (torch.cat((right[:1] & False, right[:-1])) if j else right) & (
                    loss.kept[logits.argmax(-1)] == best
                )
                hits[j] += int((right & counted & greedy).sum())
                roots[j] += int((counted & greedy).sum())
                if overlap:
                    both = torch.minimum(law, logits.softmax(-1)).sum(-1)
                    shared[j] += float(both[counted].sum())
                    rows[j] += int(counted.sum())
    full = hits / roots.clamp_min(1)
    before = torch.cat((torch.ones(1, dtype=full.dtype), full[:-1]))
    out = {
        "full": [round(float(f), 4) for f in full],
        "conditional": [round(float(f), 4) for f in full / before.clamp_min(1e-12)],
        "chain": round(1 + float(full.sum()), 3),
        "covered": round(covered[0] / max(1, covered[1]), 4),
        "rows": int(roots[0]),
    }
    if overlap:
        out["alpha"] = [round(float(a), 4) for a in shared / rows.clamp_min(1)]
    return out


def _law(loss: EagleLoss, target: Tensor) -> Tensor:
    """The target's whole law [N, V'], at the tokens that can be drafted."""
    pieces = [loss.decoder.logits(rows).softmax(-1)[:, loss.kept] for rows in torch.split(target, 256)]
    return torch.cat(pieces)
