"""Rows that stay in 16 bits inside a payload: attention sinks, the recent window, sliding-window layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from workbench.kv.cached import CachedRows
from workbench.spec.errors import UnsupportedInput


def sixteen(dtype: torch.dtype) -> torch.dtype:
    """The 16-bit dtype in which rows of a cache of ``dtype`` are kept."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float16


def to_bytes(rows: CachedRows, layers: Sequence[int]) -> bytes:
    """Keys then values of ``layers`` [2, L, T, Hkv, D] in 16 bits.

    Raises :class:`UnsupportedInput` for elements beyond float16's range.
    """
    if not layers or not rows.tokens:
        return b""
    both = torch.stack([torch.stack([side[i] for i in layers]) for side in (rows.k, rows.v)])
    kept = both.to(sixteen(both.dtype)).contiguous()
    if not bool(torch.isfinite(kept).all()):
        raise UnsupportedInput(
            "Rows that kvtc keeps in 16 bits hold infinities, NaN or values beyond float16.",
            hint="Encode a bfloat16 cache.",
        )
    return kept.view(torch.uint8).numpy().tobytes()


def from_bytes(data: bytes | memoryview, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> Tensor:
    """[2, L, T, Hkv, D] in ``dtype``, of ``shape`` (L, T, Hkv, D) as :func:`to_bytes` stored it."""
    flat = torch.from_numpy(np.frombuffer(data, np.int16).copy())
    return flat.view(sixteen(dtype)).reshape(2, *shape).to(dtype)


def nbytes(layers: int, tokens: int, heads: int, dim: int) -> int:
    """Bytes of :func:`to_bytes`."""
    return 4 * layers * tokens * heads * dim
