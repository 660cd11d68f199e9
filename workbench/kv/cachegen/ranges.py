"""Symbols to bytes through a range coder with fixed tables, a channel after the other.

One stream per side and layer, so that layers decode one at a time. The coder is constriction's (arXiv
2201.01741); its laws are exact ratios of 16-bit frequencies, so every machine derives the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workbench.kv.cachegen.tables import TOTAL
from workbench.spec.errors import MissingExtra, PayloadError

Part = tuple[Tensor, np.ndarray]
"""Symbols uint8 [T, C] and their frequencies uint16 [C, S]."""


def encode(parts: Sequence[Part]) -> bytes:
    """The range-coded bytes of one side of one layer; raises :class:`MissingExtra` without constriction."""
    stream = _constriction()
    out = stream.queue.RangeEncoder()
    laws = [_laws(frequencies) for _, frequencies in parts]
    columns = [np.ascontiguousarray(codes.numpy().T).astype(np.int32) for codes, _ in parts]
    for channel in range(len(laws[0])):
        for law, column in zip(laws, columns, strict=True):
            if column.shape[1]:
                out.encode(column[channel], stream.model.Categorical(law[channel], perfect=False, lazy=False))
    data: bytes = out.get_compressed().astype("<u4").tobytes()
    return data


def decode(data: bytes | memoryview, parts: Sequence[tuple[int, np.ndarray]]) -> list[Tensor]:
    """Symbols uint8 [T, C] of every part, given its number of rows and its frequencies.

    Raises :class:`PayloadError` for bytes that :func:`encode` cannot have written with these tables.
    """
    stream = _constriction()
    if len(data) % 4:
        raise PayloadError("A range-coded stream is whole 32-bit words.", hint="Get it again.")
    source = stream.queue.RangeDecoder(np.frombuffer(data, "<u4").astype(np.uint32))
    laws = [_laws(frequencies) for _, frequencies in parts]
    columns = [np.zeros((len(law), rows), np.uint8) for law, (rows, _) in zip(laws, parts, strict=True)]
    try:
        for channel in range(len(laws[0])):
            for law, column in zip(laws, columns, strict=True):
                if column.shape[1]:
                    model = stream.model.Categorical(law[channel], perfect=False, lazy=False)
                    column[channel] = source.decode(model, column.shape[1])
    except (ValueError, AssertionError) as err:
        raise PayloadError(f"The range-coded stream is damaged: {err}", hint="Get it again.") from None
    if not source.maybe_exhausted():
        raise PayloadError("The range-coded stream is longer than what it codes.", hint="Get it again.")
    return [torch.from_numpy(np.ascontiguousarray(column.T)) for column in columns]


def ideal_bits(parts: Sequence[Part]) -> float:
    """Bits that the tables assign to the symbols: what a perfect coder would need. Never a size."""
    bits = 0.0
    for codes, frequencies in parts:
        price = -np.log2(frequencies / TOTAL)
        bits += float(np.take_along_axis(price, codes.numpy().T.astype(np.int64), 1).sum())
    return bits


def _laws(frequencies: np.ndarray) -> np.ndarray:
    law: np.ndarray = frequencies.astype(np.float32) / np.float32(TOTAL)
    return law


def _constriction() -> Any:
    try:
        from constriction import stream
    except ImportError:
        raise MissingExtra("constriction", "codec", "cachegen") from None
    return stream
