"""A drafter's model with KV of its own, in slots that no order binds: a node's row stays where it is.

Positions are absolute, so a key that was rotated for its place in the tree is right for its place among the
committed tokens: when a verdict accepts a node nothing is computed again and nothing moves. What a row sees
is a list of slots (committed ones, its ancestors', its own), not a range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.models.decoder import Attend, Decoder
from workbench.spec.errors import InvariantError

_GROWTH = 256


@dataclass(frozen=True)
class Fed:
    """``logits`` [asked, V]. ``ahead``: ids that each of these rows guesses behind the next one."""

    logits: Tensor
    ahead: tuple[tuple[int, ...], ...]


class TreeKV:
    """``decoder`` and K, V [slots, Hkv, D] of each of its layers; slots come as they are asked for.

    ``ids`` [n]: the tokens its logits are of; None: all.
    """

    def __init__(self, decoder: Decoder, ids: Tensor | None = None) -> None:
        self.decoder = decoder
        self._ids = ids
        config, weights = decoder.config, decoder.weights
        self._shape = (config.num_kv_heads, config.head_dim)
        self._kv = [
            torch.zeros(2, 0, *self._shape, dtype=weights.residual_dtype, device=weights.device)
            for _ in range(config.num_layers)
        ]
        self._positions = torch.zeros(0, dtype=torch.int64, device=weights.device)
        self._windows = {i: g.window for g in config.kv_groups for i in g.layers}
        self._free: list[int] = []

    @property
    def limit(self) -> int:
        """Positions there are."""
        return self.decoder.config.max_position

    def nbytes(self) -> int:
        """Bytes of K and V held, free slots included."""
        return sum(kv.untyped_storage().nbytes() for kv in self._kv)

    def weights_nbytes(self) -> int:
        """Bytes of its weights and rotary tables."""
        return self.decoder.weights.nbytes() + self.decoder.table_nbytes

    @property
    def used(self) -> int:
        """Slots that hold something."""
        return len(self._positions) - len(self._free)

    def take(self, n: int) -> list[int]:
        """``n`` free slots."""
        while len(self._free) < n:
            self._grow()
        return [self._free.pop() for _ in range(n)]

    def give(self, slots: Sequence[int]) -> None:
        """These are needed no more. Raises :class:`InvariantError` for one that is free already."""
        if set(slots) & set(self._free) or len(set(slots)) != len(slots):
            raise InvariantError(f"KV slots {sorted(slots)} were given back twice.")
        self._free += slots

    def feed(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        sees: Sequence[Sequence[int]],
        asked: int,
    ) -> Fed:
        """Logits [asked, V] of the last rows. Row i writes ``slots[i]`` and sees the slots ``sees[i]``."""
        attend, at = self._attends(positions, slots, sees)
        rows = torch.arange(len(tokens) - asked, len(tokens), device=at.device)
        ids = torch.tensor(tokens, device=at.device)
        return Fed(self.decoder.forward(ids, at, attend, logits_rows=rows).logits, ((),) * asked)

    def ranked(self, logits: Tensor, k: int) -> list[list[tuple[int, float]]]:
        """The ``k`` likeliest tokens of each row of :meth:`feed`, with the logarithms of their chances."""
        values, places = logits.log_softmax(-1).topk(min(k, logits.shape[-1]))
        tokens = places if self._ids is None else self._ids[places]
        return [
            list(zip(ids, chances, strict=True))
            for ids, chances in zip(tokens.tolist(), values.tolist(), strict=True)
        ]

    def _attends(
        self, positions: Sequence[int], slots: Sequence[int], sees: Sequence[Sequence[int]]
    ) -> tuple[Attend, Tensor]:
        """The attention of rows that write ``slots`` and see ``sees``; their positions int64 [T]."""
        device = self._positions.device
        where = torch.tensor(slots, device=device)
        at = torch.tensor(positions, device=device)
        self._positions[where] = at
        width = max(len(s) for s in sees)
        # Padded with the row's own slot, which is masked where it is padding.
        index = torch.tensor([[*s, *([o] * (width - len(s)))] for s, o in zip(sees, slots, strict=True)])
        shown = torch.arange(width) < torch.tensor([len(s) for s in sees])[:, None]
        index, shown = index.to(device), shown.to(device)
        behind = at[:, None] - self._positions[index]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kv = self._kv[layer]
            kv[0, where], kv[1, where] = k.to(kv.dtype), v.to(kv.dtype)
            window = self._windows[layer]
            seen = shown if window is None else shown & (behind < window)
            return self._attention(q, kv[0][index], kv[1][index], seen)

        return attend, at

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """``q`` [T, Hq, D] scaled, ``k``, ``v`` [T, S, Hkv, D], ``seen`` [T, S] -> [T, Hq * D]."""
        rows, heads, dim = q.shape
        grouped = q.to(k.dtype).view(rows, k.shape[2], -1, dim)
        scores = torch.einsum("thgd,tshd->thgs", grouped, k)
        cap = self.decoder.config.attn_softcap
        if cap is not None:
            scores = (scores / cap).tanh() * cap
        weights = scores.masked_fill(~seen[:, None, None], -math.inf).softmax(-1)
        return torch.einsum("thgs,tshd->thgd", weights, v).reshape(rows, heads * dim).to(q.dtype)

    def _grow(self) -> None:
        held = len(self._positions)
        self._kv = [torch.cat([kv, kv.new_zeros(2, _GROWTH, *self._shape)], 1) for kv in self._kv]
        self._positions = torch.cat([self._positions, self._positions.new_zeros(_GROWTH)])
        self._free += range(held + _GROWTH - 1, held - 1, -1)
