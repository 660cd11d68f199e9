"""Streams side by side, each normed or as it is: what the linears of a draft head read.

EAGLE-3 reads [norm(embedding), norm(state)], DeepSeek's module the same, EAGLE-1 [embedding, state], and the
states of EAGLE-3 are made of three streams. One description serves them all, and the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.models.compiled import Native
from workbench.models.compiled_join import compiled_joined
from workbench.models.norms import Norm, fast_norm, pinned_norm
from workbench.models.packed import PackedLinear


@dataclass(frozen=True)
class Join:
    """One gain [H] in the residual dtype per part, None where it is not normed."""

    gains: tuple[Tensor | None, ...]
    eps: float
    norms: tuple[Norm | None, ...]

    @classmethod
    def of(cls, gains: Sequence[Tensor | None], eps: float, numerics: str) -> Join:
        """Norms of a class of numerics."""
        norm = pinned_norm if numerics == "pinned" else fast_norm
        return cls(tuple(gains), eps, tuple(None if g is None else norm(g, eps) for g in gains))

    def __call__(self, *parts: Tensor) -> Tensor:
        """[T, n * H] of n ``parts`` [T, H]."""
        rows = [x if norm is None else norm(x) for norm, x in zip(self.norms, parts, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


def joined_linear(join: Join, linear: PackedLinear, dtype: torch.dtype) -> Callable[..., Tensor]:
    """``linear`` of joined parts: [T, n] in ``dtype`` of as many [T, H] as ``join`` has gains."""
    if isinstance(linear.native, Native) and not linear.gated:
        return compiled_joined(join.gains, join.eps, linear.native)
    return lambda *parts: linear(join(*parts)).to(dtype)
