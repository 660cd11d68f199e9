"""Acceptance of whole chains at once: masks and cumulative products where the ragged path has loops.

*match* is R1 at temperature 0 and R3 (sample and match) above it; *reject* is R2 (Leviathan et al., arXiv
2211.17192, algorithm 1) on the adjusted probabilities of the likeliest tokens. Both as in
:mod:`workbench.speculative.rules`, with the same noise: the same tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from workbench.speculative.fused.laws import TopLaw, at_ids, chance, draw

SENTINEL = -1
"""Stands behind a round's tokens; never an id."""


class Judged(NamedTuple):
    """``accepted`` int64 [B] drafts are kept, then follows ``own`` int64 [B]; float64 [B, γ] each draft's
    ``expected`` acceptance before it was looked at."""

    accepted: Tensor
    own: Tensor
    expected: Tensor


def leading(hits: Tensor, room: Tensor) -> Tensor:
    """How many of ``hits`` bool [B, γ] are true before the first that is not, ``room`` int64 [B] at most."""
    allowed = torch.arange(hits.shape[1], device=hits.device) < room[:, None]
    return (hits & allowed).long().cumprod(1).sum(1)


def match(drafts: Tensor, said: Tensor, room: Tensor, chances: Tensor | None) -> Judged:
    """Keep ``drafts`` [B, γ] while they are what the model ``said`` [B, γ + 1]; ``chances`` [B, γ] that it
    would, or None where it could say nothing else."""
    hits = said[:, :-1] == drafts
    accepted = leading(hits, room)
    own = said.gather(1, accepted[:, None])[:, 0]
    return Judged(accepted, own, hits.double() if chances is None else chances)


def reject(
    drafts: Tensor, p: TopLaw, q: TopLaw, room: Tensor, coins: Tensor, uniforms: Tensor, vocab: int
) -> Judged:
    """Accept a draft x ~ q where its coin is below p(x) / q(x); behind the last, draw from (p - q)₊ or p.

    ``p`` of γ + 1 rows, ``q`` of γ; ``coins`` float64 [B, γ], ``uniforms`` float64 [B, γ + 1, V].
    """
    length = drafts.shape[1]
    head = TopLaw(p.ids[:, :length], p.p[:, :length])
    theirs = at_ids(q, head.ids, vocab).to(head.p.dtype)
    accepted = leading(coins < chance(head, drafts) / chance(q, drafts), room)
    left = (head.p - theirs).clamp_min(0)
    total = left.sum(-1, keepdim=True)
    left = torch.where(total > 0, left / total, head.p)
    judged = torch.arange(length, device=drafts.device) < room[:, None]  # behind them drafts do not count
    law = torch.cat((torch.where(judged[..., None], left, head.p), p.p[:, length:]), 1)
    said = draw(TopLaw(p.ids, law), uniforms)
    own = said.gather(1, accepted[:, None])[:, 0]
    return Judged(accepted, own, torch.minimum(head.p, theirs).sum(-1).double())


def padded(drafts: Tensor, judged: Judged) -> Tensor:
    """A round's tokens int64 [B, γ + 1]: accepted drafts, the model's own, then :data:`SENTINEL`."""
    place = torch.arange(drafts.shape[1] + 1, device=drafts.device)
    behind = torch.cat((drafts, drafts[:, :1]), 1)
    out = torch.where(place < judged.accepted[:, None], behind, SENTINEL)
    return torch.where(place == judged.accepted[:, None], judged.own[:, None], out)
