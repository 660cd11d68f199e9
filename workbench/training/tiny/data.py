"""Token streams: documents joined by ``<|endoftext|>``, and windows drawn from them.

Window number ``k`` starts at ``frac(phase + k * golden ratio)`` of the stream. That
sequence covers the stream evenly at every length (its gaps have at most three sizes,
Steinhaus' theorem), needs no permutation to be stored, and makes a resumed run see
exactly the windows it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from workbench.training.errors import TrainingError
from workbench.training.tiny.tokenizer import END_OF_TEXT

_GOLDEN = (5**0.5 - 1) / 2


def encode_stream(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """One ``uint16`` vector of all texts, each followed by ``<|endoftext|>``."""
    ids: list[np.ndarray] = []
    for encoding in tokenizer.encode_batch_fast(list(texts)):
        ids.append(np.asarray([*encoding.ids, END_OF_TEXT], dtype=np.uint16))
    return np.concatenate(ids) if ids else np.zeros(0, np.uint16)


@dataclass(frozen=True)
class Windows:
    """Evenly spread windows of a token stream."""

    stream: np.ndarray
    seed: int = 0

    def batch(self, first: int, count: int, length: int) -> Tensor:
        """Windows ``first … first + count - 1`` as int64 ``[count, length]``.

        Raises TrainingError if the stream is shorter than one window.
        """
        room = len(self.stream) - length
        if room < 0:
            raise TrainingError(f"The corpus has {len(self.stream)} tokens, a window needs {length}.")
        phase = np.random.default_rng(self.seed).random()
        starts = [int(((phase + k * _GOLDEN) % 1.0) * (room + 1)) for k in range(first, first + count)]
        rows = np.stack([self.stream[start : start + length] for start in starts])
        return torch.from_numpy(rows.astype(np.int64))
