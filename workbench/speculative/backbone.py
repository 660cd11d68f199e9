"""Backbone expansion: a draft tree from laws that do not depend on what was drafted before them.

Huang et al., *FastEagle* (arXiv 2509.20416): at every depth the ``width`` likeliest tokens are candidates;
the likeliest continues the backbone, the others are leaves beside it. So N depths make N · width nodes, not
width to the N.
"""

from __future__ import annotations

import math

from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree


def backbone(
    context: DraftContext, logits: Tensor, width: int, ids: Tensor | None, name: str
) -> DraftTree | None:
    """The tree of ``logits`` [N, W], row i for the i-th token ahead; as many nodes as there is room for."""
    law = context.law
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    path: list[int] = []
    parent = -1
    for row in logits:
        best = law.top(row, path, width, ids=ids) if law is not None else []
        best = best[: context.room - len(tokens)]
        if not best:
            break
        first = len(tokens)
        for token, chance in best:
            tokens.append(token)
            parents.append(parent)
            chances.append(math.exp(chance))
        parent = first
        path.append(best[0][0])
    if not tokens:
        return None
    return DraftTree(tuple(tokens), tuple(parents), name, confidence=tuple(chances))
