"""Probability tables: how often each symbol comes, per side, layer and channel.

Counted once per model on calibration text (section 5.2 of the paper: grouping by channel and layer is what
lowers the entropy). A channel's counts are completed by half a pseudo-count per symbol, spread as in its
whole layer, so that no symbol is impossible and rare ones of a sparsely seen channel are not overpriced.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from workbench.kv.cachegen.levels import SIDES, Alphabet, Side

TOTAL = 1 << 16  # frequencies of a table add up to this


class SymbolCounts:
    """Counts of one alphabet: int64 [2, layers, channels, symbols]."""

    def __init__(self, alphabet: Alphabet, layers: int, channels: int) -> None:
        self.counts = np.zeros((2, layers, channels, alphabet.symbols), dtype=np.int64)

    def add(self, side: Side, layer: int, codes: Tensor) -> None:
        """Count symbols uint8 [T, C] of one layer."""
        channels, symbols = self.counts.shape[2:]
        flat = codes.numpy().astype(np.int64) + np.arange(channels) * symbols
        found = np.bincount(flat.ravel(), minlength=channels * symbols)
        self.counts[SIDES.index(side), layer] += found.reshape(channels, symbols)

    def frequencies(self) -> np.ndarray:
        """uint16 [2, layers, channels, symbols], at least 1 each, rows adding up to 65,536."""
        symbols = self.counts.shape[-1]
        layer = self.counts.sum(2, keepdims=True) + 1.0
        law = self.counts + symbols / 2 * layer / layer.sum(-1, keepdims=True)
        return integers(law)


def integers(law: np.ndarray) -> np.ndarray:
    """Positive weights [..., S] as uint16 frequencies: at least 1, rows adding up to 65,536."""
    share = law / law.sum(-1, keepdims=True) * (TOTAL - law.shape[-1])
    out = 1 + np.floor(share).astype(np.int64)
    top = share.argmax(-1)[..., None]
    rest = TOTAL - out.sum(-1, keepdims=True)
    np.put_along_axis(out, top, np.take_along_axis(out, top, -1) + rest, -1)
    return np.asarray(out, dtype=np.uint16)


def pooled(frequencies: np.ndarray) -> np.ndarray:
    """The same table for all layers and channels of a side: what the split into channels is compared with.

    Every channel was counted on the same tokens, so the mean of their laws is the law of all of them.
    """
    law = frequencies.astype(np.float64).mean((1, 2), keepdims=True)
    return np.ascontiguousarray(np.broadcast_to(integers(law), frequencies.shape))  # rows are read one by one
