"""Laws over the likeliest tokens of each row, all at once: what a round of fixed shapes samples and judges.

A row's law is that of :func:`workbench.engine.processing.law` (temperature → top-k → top-p → min-p) for
requests whose top-k is at most the number of tokens kept: nothing is left out, so rules on it are exact.
Temperature 0 is the law of the likeliest token, the lowest of equal ones. Pure functions without branches
on numbers; noise is that of :mod:`workbench.engine.noise`, so a draw is the one of the ragged path.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.engine.processing import first_max


class Settings(NamedTuple):
    """Of B sequences, each [B, 1, 1]: temperature (0: greedy), top-k (0: all), top-p, min-p."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


class TopLaw(NamedTuple):
    """``p`` [B, R, K] of the tokens ``ids`` int64 [B, R, K], likeliest first; adds up to 1."""

    ids: Tensor
    p: Tensor


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest token int64 [B, R] of ``logits`` [B, R, V], the lowest of equal ones."""
    return first_max(logits.flatten(0, 1))[1].view(logits.shape[:2])


def top_law(logits: Tensor, settings: Settings, most: int) -> TopLaw:
    """The laws of ``logits`` [B, R, V] among the ``most`` likeliest tokens."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    values, ids = x.topk(min(most, x.shape[-1]))
    rank = torch.arange(values.shape[-1], device=x.device)
    temperature = settings.temperature.to(x.dtype)
    scaled = (values - values[..., :1]) / temperature.clamp_min(torch.finfo(x.dtype).tiny)
    kept = (settings.top_k == 0) | (rank < settings.top_k)
    scaled = scaled.masked_fill(~kept, -math.inf)
    p = scaled.softmax(-1)
    before = p.cumsum(-1, dtype=torch.float64) - p
    kept = (settings.top_p >= 1) | (before < settings.top_p) | (rank == 0)
    scaled = scaled.masked_fill(~kept, -math.inf)
    scaled = scaled.masked_fill(scaled < settings.min_p.to(x.dtype).log(), -math.inf)
    likeliest = (rank == 0).to(x.dtype)
    greedy = settings.temperature == 0
    p = torch.where(greedy, likeliest, scaled.softmax(-1))
    first = torch.where(rank == 0, greedy_tokens(x)[..., None], ids)
    return TopLaw(torch.where(greedy, first, ids), p)


def draw(law: TopLaw, uniforms: Tensor) -> Tensor:
    """A token int64 [B, R] of each row, by the noise of its place: float64 ``uniforms`` [B, R, V]."""
    race = -uniforms.gather(-1, law.ids).clamp_min(2.0**-54).log()
    score = torch.where(law.p > 0, law.p.double() / race, -1.0)
    return law.ids.gather(-1, score.argmax(-1, keepdim=True))[..., 0]


def chance(law: TopLaw, tokens: Tensor) -> Tensor:
    """Float64 [B, R]: what each row's law gives its ``tokens`` int64 [B, R]."""
    return torch.where(law.ids == tokens[..., None], law.p, 0.0).sum(-1).double()


def at_ids(law: TopLaw, ids: Tensor, vocab: int) -> Tensor:
    """What each row's law gives the tokens ``ids`` int64 [B, R, K] of ``vocab``, in its own dtype."""
    whole = law.p.new_zeros((*law.p.shape[:2], vocab)).scatter(-1, law.ids, law.p)
    return whole.gather(-1, ids)
