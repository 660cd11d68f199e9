"""Rotary position embedding, all scaling kinds (RoFormer, arXiv 2104.09864).

Frequencies are float64; angles are formed in float64 from exact integer positions and only their
cosines and sines are rounded, to float32 (or kept in float64). The layout is half-split: component
``i`` rotates with ``i + D/2``, as canonical Hugging Face checkpoints store q and k.

A phase is a function of the absolute position alone. Kinds whose frequencies depend on a length
(dynamic NTK, LongRoPE) are therefore resolved once, from the context limit of the model: up to the
original context they are unscaled (dynamic) or short (LongRoPE); a model given a longer limit with
``ModelConfig.with_max_position`` is stretched to it at every position. Positions at or above the
limit are refused.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.models.rope_spec import RopeSpec
from workbench.spec.errors import PromptTooLong


def frequencies(spec: RopeSpec, head_dim: int, limit: int) -> Tensor:
    """Angular frequencies, float64 [head_dim / 2], in radians per token.

    ``limit`` is the context limit in tokens; only dynamic NTK and LongRoPE look at it. YaRN: arXiv
    2309.00071 sec. 3.2; LongRoPE: arXiv 2402.13753; Llama 3: bands between two wavelengths are blended.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    theta = spec.theta
    if spec.kind == "dynamic" and limit > spec.original_max:
        stretch = spec.factor * limit / spec.original_max - (spec.factor - 1)
        theta *= stretch ** (head_dim / (head_dim - 2))
    base = theta**-exponent
    if spec.kind == "linear":
        return base / spec.factor
    if spec.kind == "yarn":
        kept = 1 - _yarn_ramp(spec, head_dim)
        return base / spec.factor * (1 - kept) + base * kept
    if spec.kind == "llama3":
        return _llama3(spec, base)
    if spec.kind == "longrope":
        factors = spec.long_factor if limit > spec.original_max else spec.short_factor
        return base / torch.tensor(factors, dtype=torch.float64)
    return base


def _yarn_ramp(spec: RopeSpec, head_dim: int) -> Tensor:
    """From 0 (more than ``beta_fast`` turns in the original context) to 1 (fewer than ``beta_slow``)."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(spec.original_max / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as the reference implementation: keeps the ramp finite
    return ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)


def _llama3(spec: RopeSpec, base: Tensor) -> Tensor:
    turns = spec.original_max * base / (2 * math.pi)
    smooth = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * base / spec.factor + smooth * base


class RopeTable:
    """Cosines and signed sines by position, grown as positions appear.

    ``dtype`` is float32 or float64; rows are ``[2, head_dim]``: cosines, then sines whose first half
    is negated, so that rotating is ``x * cos + x.roll(D/2) * sin``.
    """

    def __init__(
        self,
        spec: RopeSpec,
        head_dim: int,
        limit: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.limit = limit
        self._frequencies = frequencies(spec, head_dim, limit)
        self._scale = spec.attention_factor
        self._rows = torch.empty((0, 2, head_dim), dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes held by the frequencies and by the rows built so far."""
        return sum(t.untyped_storage().nbytes() for t in (self._frequencies, self._rows))

    def reserve(self, length: int) -> None:
        """Build the rows of positions below ``length`` (at most the limit) now, not when they appear."""
        length = min(length, self.limit)
        if length > self._rows.shape[0]:
            self._grow(length)

    def gather(self, positions: Tensor, highest: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, each [T, head_dim], of int64 ``positions`` [T], at most ``highest``.

        Raises ``PromptTooLong`` when ``highest`` is at or above the context limit.
        """
        rows = self.rows(highest).index_select(0, positions)
        return rows[:, 0], rows[:, 1]

    def rows(self, highest: int) -> Tensor:
        """The table [L, 2, head_dim], up to ``highest`` and perhaps further; raises as :meth:`gather`."""
        if highest >= self.limit:
            raise PromptTooLong(
                f"Position {highest} is outside the model's context of {self.limit} tokens.",
                hint="Shorten the prompt, or load the model with a longer context limit.",
            )
        if highest >= self._rows.shape[0]:
            self._grow(highest + 1)
        return self._rows

    def _grow(self, needed: int) -> None:
        length = min(self.limit, max(needed, 2 * self._rows.shape[0], 256))
        angles = torch.arange(length, dtype=torch.float64)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        rows = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        self._rows = rows.to(self._rows)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [T, heads, D] by ``RopeTable.gather``'s rows, broadcastable as [T, 1, D].

    Products and sums are separate operations, exact in themselves, so a row's bits do not depend
    on the rows beside it.
    """
    return (x.roll(x.shape[-1] // 2, -1) * sin).add_(x * cos)


def turn(x: Tensor, by: Tensor, frequencies: Tensor) -> Tensor:
    """Rotate ``x`` [..., D], which already carries its position, ``by`` further positions (int64 [...]).

    Negative numbers turn back. Computed in float64 and rounded once to ``x``'s dtype.
    """
    angles = by.to(x.device)[..., None] * frequencies.to(x.device)
    first, second = x.double().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
