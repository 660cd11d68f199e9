"""Perplexity and bits per byte of a model on the shipped evaluation text.

Bits per byte compare models with different tokenizers; perplexity is per token and does
not. Windows do not overlap, and the first token of a window is not predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel


@dataclass(frozen=True)
class TextScore:
    """What one text cost. ``nats`` over ``tokens`` predicted tokens that spell ``bytes`` bytes."""

    nats: float
    tokens: int
    bytes: int

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_byte(self) -> float:
        """Independent of the tokenizer."""
        return self.nats / math.log(2) / self.bytes

    def __add__(self, other: TextScore) -> TextScore:
        return TextScore(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)


def score(model: PreTrainedModel, tokenizer: Tokenizer, text: str, window: int = 1024) -> TextScore:
    """Score ``text`` in windows of ``window`` tokens; a rest shorter than 2 tokens is dropped."""
    losses = token_losses(model, tokenizer, text, window)
    ids = tokenizer.encode(text).ids
    kept = [ids[s + 1 : s + window] for s in range(0, len(ids), window) if len(ids) - s >= 2]
    spelled = sum(len(tokenizer.decode(rows, skip_special_tokens=False).encode()) for rows in kept)
    return TextScore(sum(map(sum, losses)), sum(map(len, losses)), spelled)


def token_losses(model: PreTrainedModel, tokenizer: Tokenizer, text: str, window: int) -> list[list[float]]:
    """Per window, the loss in nats of each predicted token (position 1 onwards)."""
    ids = torch.tensor(tokenizer.encode(text).ids)
    out = []
    for start in range(0, len(ids), window):
        row = ids[start : start + window]
        if len(row) < 2:
            continue
        with torch.inference_mode():
            logits = model(input_ids=row[None], use_cache=False).logits[0, :-1].float()
        out.append(torch.nn.functional.cross_entropy(logits, row[1:], reduction="none").tolist())
    return out
