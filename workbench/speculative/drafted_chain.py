"""A chain drafted token by token with a language model, the sequences of a step together.

What a smaller model and the first layers of the target share: each pass of the model gives the logits behind
the newest draft of every sequence that still drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workbench.engine.draft_seams import DraftContext, DraftTree


class Feeds(Protocol):
    """A model that is fed drafts."""

    def feed(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Logits [n, V] behind the given tokens of each sequence, which follow what it was fed before."""
        ...


class ChainOptions(Protocol):
    """At most ``k`` tokens; ``draws`` samples them; none behind one less likely than ``confidence``."""

    @property
    def k(self) -> int:
        """Tokens at most."""
        ...

    @property
    def draws(self) -> bool:
        """Whether they are sampled above temperature 0."""
        ...

    @property
    def confidence(self) -> float:
        """Chance of a token behind which the draft goes on."""
        ...


def draft_chains(
    contexts: Sequence[DraftContext],
    feeds: Feeds,
    options: ChainOptions,
    source: str,
    ids: Tensor | None = None,
) -> list[DraftTree | None]:
    """Chains of at most ``min(k, room)`` tokens, one pass per depth; None where nothing can follow.

    ``ids``: the tokens of the logits that ``feeds`` gives, int64 [n]; None: all.
    """
    drafts: list[list[int]] = [[] for _ in contexts]
    laws: list[list[Tensor]] = [[] for _ in contexts]
    rows: list[tuple[int, list[int]]] = [(i, []) for i, c in enumerate(contexts) if c.room > 0]
    while rows:
        logits = feeds.feed([(contexts[i].seq, tokens) for i, tokens in rows])
        rows = [
            (i, [drafts[i][-1]])
            for (i, _), row in zip(rows, logits, strict=True)
            if _extend(contexts[i], row, drafts[i], laws[i], options, ids)
        ]
    return [
        DraftTree.chain(path, source, torch.stack(q) if q else None) if path else None
        for path, q in zip(drafts, laws, strict=True)
    ]


def _extend(
    context: DraftContext,
    logits: Tensor,
    path: list[int],
    laws: list[Tensor],
    options: ChainOptions,
    ids: Tensor | None,
) -> bool:
    """Append what follows; whether the draft goes on behind it."""
    law = context.law
    pick = law.pick(logits, path, draws=options.draws, ids=ids) if law is not None else None
    if pick is None:
        return False
    path.append(pick.token)
    if pick.q is not None:
        laws.append(pick.q)
    if len(path) >= min(options.k, context.room):
        return False
    if not options.confidence:
        return True
    # A token that was drawn stays, however unlikely: dropping it would bias what is verified.
    place = pick.token if ids is None else int((ids == pick.token).nonzero()[0])
    return float(logits.float().softmax(-1)[place]) >= options.confidence
