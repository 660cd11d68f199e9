"""Draft trees as arrays: for each row, its depth and the words whose bits are the rows it descends from.

A *row* is a token forwarded in this step: the last committed token (the root) and the drafted tokens below
it, of all sequences one after another. ``parents[i]`` is the row, within its sequence, whose keys row ``i``
also sees, -1 for none (SpecInfer, arXiv 2305.09781, section 4). Bit ``j % 32`` of word ``j // 32`` of row
``i`` says that row ``i`` sees row ``j``, itself included; a chain is a tree without siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workbench.spec.errors import UnsupportedInput

WORD = 32


@dataclass(frozen=True)
class TreeRows:
    """The rows of a step.

    ``first`` int32 [B + 1]: rows of sequence ``b`` are ``first[b] .. first[b + 1]``; ``depth`` int32 [T], 0
    for rows without a parent; ``words`` int32 [T, W]; ``keys`` int32 [B]: how many of a sequence's own rows
    can be seen at all, its number of rows, or 0 when the rows only look ``back``.
    """

    first: Tensor
    depth: Tensor
    words: Tensor
    keys: Tensor
    counts: tuple[int, ...]
    back: bool = False

    @property
    def longest(self) -> int:
        """Most own keys that a sequence adds to what is cached."""
        return 0 if self.back else max(self.counts, default=0)

    def to(self, device: torch.device | str) -> TreeRows:
        """The same rows on another device."""
        first, depth, words, keys = (x.to(device) for x in (self.first, self.depth, self.words, self.keys))
        return TreeRows(first, depth, words, keys, self.counts, self.back)


def chain(n: int) -> tuple[int, ...]:
    """Parents of ``n`` rows without branches."""
    return tuple(range(-1, n - 1))


def tree_rows(parents: Sequence[Sequence[int]], *, window: int | None = None) -> TreeRows:
    """Rows of sequences given by the parents of each; with ``window`` ancestors that far up are not seen.

    Raises ``UnsupportedInput`` when a parent does not come before its child.
    """
    blocks, depths = [], []
    for b, tree in enumerate(parents):
        seen = np.zeros((len(tree), len(tree)), dtype=bool)
        depth = np.zeros(len(tree), dtype=np.int32)
        for i, parent in enumerate(tree):
            if not -1 <= parent < i:
                raise UnsupportedInput(
                    f"Row {i} of sequence {b} has parent {parent}.",
                    hint="Parents come before their children; -1 is none.",
                )
            if parent >= 0:
                seen[i], depth[i] = seen[parent], depth[parent] + 1
            seen[i, i] = True
        if window is not None:
            seen &= depth[:, None] - depth[None, :] < window
        blocks.append(seen)
        depths.append(depth)
    counts = tuple(len(tree) for tree in parents)
    width = max(1, -(-max(counts, default=0) // WORD))
    words = np.concatenate([_words(seen, width) for seen in blocks] or [np.zeros((0, width), np.int32)])
    return TreeRows(
        torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        torch.from_numpy(np.concatenate(depths or [np.zeros(0, np.int32)])),
        torch.from_numpy(words),
        torch.tensor(counts, dtype=torch.int32),
        counts,
    )


def looking_back(counts: Sequence[int]) -> TreeRows:
    """``counts[b]`` rows per sequence that see what is cached and none of each other: shared prefixes."""
    rows = tree_rows([(-1,) * n for n in counts])
    nothing = torch.zeros_like(rows.words), torch.zeros_like(rows.keys)
    return TreeRows(rows.first, rows.depth, *nothing, rows.counts, back=True)


def unpack(words: Tensor, n: int) -> Tensor:
    """Bits of ``words`` int32 [T, W] as bool [T, n]."""
    bit = torch.arange(n, device=words.device)
    return (words[:, bit // WORD] >> (bit % WORD)) & 1 == 1


def _words(seen: NDArray[np.bool_], width: int) -> NDArray[np.int32]:
    padded = np.zeros((len(seen), width * WORD), dtype=np.uint32)
    padded[:, : seen.shape[1]] = seen
    bits = padded.reshape(len(seen), width, WORD) << np.arange(WORD, dtype=np.uint32)
    packed: NDArray[np.uint32] = bits.sum(-1, dtype=np.uint32)
    return packed.view(np.int32)
