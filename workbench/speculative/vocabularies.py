"""Two tokenizers side by side: which tokens a second model shares with the target, and text in both.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (arXiv 2502.05202). Tokens are the same when they stand for the same bytes, however their
vocabulary spells them, or are the same special token. A drafter that gives all its chance to shared tokens
(their TLI) has a law over the target's ids, so rejection sampling stays exact, whatever the drafter has read:
its context need not be how its own tokenizer would cut the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from workbench.models.stream import token_bytes
from workbench.models.tokenizer import Tokenizer
from workbench.spec.errors import TokenizerError

Relation = Literal["same", "overlapping", "disjoint"]
_TAIL = 8
"""Tokens before a piece of text that may shape how its first token is written."""


@dataclass(frozen=True)
class Vocabularies:
    """``shared`` int64 [n]: the target's ids that the second model has, ascending; ``places``: there."""

    target: Tokenizer
    second: Tokenizer
    shared: Tensor
    places: Tensor
    relation: Relation
    _known: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, target: Tokenizer, second: Tokenizer) -> Vocabularies:
        """Compare."""
        mine, theirs = spellings(target), spellings(second)
        pairs = sorted((i, theirs[key]) for key, i in mine.items() if key in theirs)
        shared, places = (torch.tensor([p[n] for p in pairs], dtype=torch.int64) for n in (0, 1))
        same = mine == theirs and target.vocab_size == second.vocab_size
        known: dict[int, tuple[int, ...]] = {i: (j,) for i, j in pairs}
        relation: Relation = "same" if same else "overlapping" if pairs else "disjoint"
        return cls(target, second, shared, places, relation, known)

    def translated(self, ids: Iterable[int]) -> list[int]:
        """The second model's ids for the target's: the same token, or else how it writes that token's text.

        Tokens it cannot write (special ones, half a character) are left out. Where both are the same, so are
        ids: a row of the embedding that no text is written with may be drafted too.
        """
        if self.relation == "same":
            return list(ids)
        out: list[int] = []
        for i in ids:
            if i not in self._known:
                self._known[i] = self._written(i)
            out += self._known[i]
        return out

    def _written(self, i: int) -> tuple[int, ...]:
        text = self.target.decode([i])
        if not text or "\ufffd" in text:
            return ()
        return tuple(_encoded(self.second, text))

    def retold(self, before: Sequence[int], said: Sequence[int]) -> list[int]:
        """The target's ids for what the second model said behind ``before``."""
        tail = list(before[-_TAIL:])
        text = self.second.decode([*tail, *said]).removeprefix(self.second.decode(tail))
        return _encoded(self.target, text.removesuffix("\ufffd")) if text else []


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text; none where one would have no embedding."""
    try:
        return tokenizer.encode(text, add_special=False)
    except TokenizerError:
        return []


def spellings(tokenizer: Tokenizer) -> dict[tuple[bool, bytes], int]:
    """Ids by what a token stands for: whether it is special, and its bytes. The lowest of several that are
    alike."""
    backend = tokenizer.backend
    special = {i for i, t in backend.get_added_tokens_decoder().items() if t.special}
    bytes_of = token_bytes(backend)
    out: dict[tuple[bool, bytes], int] = {}
    for token, i in sorted(backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]):
        if i < tokenizer.vocab_size:
            key = (True, token.encode()) if i in special else (False, bytes_of(token))
            out.setdefault(key, i)
    return out
