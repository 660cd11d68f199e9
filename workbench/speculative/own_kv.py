"""A second model with KV of its own: every sequence's keys and values in one growing block.

For a drafter whose sizes are not the target's, so that its KV cannot lie in the target's pages. It is fed
what follows; what was fed and did not come true is taken back by the length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.decoder import Decoder
from workbench.spec.errors import UnsupportedModel

_GROWTH = 256


class OwnKV:
    """``decoder`` and K, V [Hkv, slots, D] of each of its layers and sequences.

    Raises :class:`UnsupportedModel` for a model that caps its attention scores.
    """

    def __init__(self, decoder: Decoder) -> None:
        if decoder.config.attn_softcap is not None:
            raise UnsupportedModel(
                "A draft model may not cap its attention scores.", hint="Choose another draft model."
            )
        self.decoder = decoder
        self._held: dict[int, list[Tensor]] = {}
        self._ids: dict[int, list[int]] = {}

    @property
    def limit(self) -> int:
        """Positions there are."""
        return self.decoder.config.max_position

    def keep(self, seq: int, ids: Sequence[int]) -> int:
        """Take back what was fed beyond the first tokens that are those of ``ids``; how many stay.

        One less than there are, at most: the newest has to be run to be answered.
        """
        fed = self._ids.setdefault(seq, [])
        same = 0
        for a, b in zip(fed, ids[:-1], strict=False):
            if a != b:
                break
            same += 1
        del fed[same:]
        return same

    def forget(self, seq: int) -> None:
        """The sequence ended."""
        self._ids.pop(seq, None)
        self._held.pop(seq, None)

    def feed(self, rows: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """Logits [n, V] behind the given ids of each sequence, one or more, which follow those fed before."""
        spans: list[tuple[int, slice, int]] = []  # sequence, its rows, how many came before
        flat: list[int] = []
        positions: list[int] = []
        for seq, ids in rows:
            fed = self._ids.setdefault(seq, [])
            start, begin = len(fed), len(flat)
            fed += ids
            flat += ids
            positions += range(start, len(fed))
            spans.append((seq, slice(begin, len(flat)), start))
            self._reserve(seq, len(fed))
        device, config = self.decoder.weights.device, self.decoder.config

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = config.window(layer)
            outs = []
            for seq, at, start in spans:
                kv, end = self._held[seq][layer], start + at.stop - at.start
                kv[0, :, start:end], kv[1, :, start:end] = k[at].transpose(0, 1), v[at].transpose(0, 1)
                outs.append(_attend(q[at].to(kv.dtype), kv[:, :, :end], start, window))
            return torch.cat(outs).to(q.dtype)

        last = torch.tensor([at.stop - 1 for _, at, _ in spans], device=device)
        return self.decoder.forward(
            torch.tensor(flat, device=device),
            torch.tensor(positions, device=device),
            attend,
            logits_rows=None if len(last) == len(flat) else last,
        ).logits

    def nbytes(self) -> int:
        """Bytes of K and V, free slots included."""
        return sum(kv.untyped_storage().nbytes() for held in self._held.values() for kv in held)

    def _reserve(self, seq: int, slots: int) -> None:
        config, weights = self.decoder.config, self.decoder.weights
        held = self._held.get(seq)
        if held is not None and held[0].shape[2] >= slots:
            return
        room = -(-slots // _GROWTH) * _GROWTH
        made = [
            torch.zeros(
                2,
                config.num_kv_heads,
                room,
                config.head_dim,
                dtype=weights.residual_dtype,
                device=weights.device,
            )
            for _ in range(config.num_layers)
        ]
        for new, old in zip(made, held or [], strict=False):
            new[:, :, : old.shape[2]] = old
        self._held[seq] = made


def _attend(q: Tensor, kv: Tensor, start: int, window: int | None) -> Tensor:
    """[n, Hq * D] of scaled queries [n, Hq, D] at positions from ``start`` on, over ``kv`` [2, Hkv, S, D]."""
    rows = torch.arange(start, kv.shape[2], device=q.device)[:, None]
    keys = torch.arange(kv.shape[2], device=q.device)
    seen = keys <= rows
    if window is not None:
        seen &= keys > rows - window
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], kv[:1], kv[1:], attn_mask=seen, scale=1.0, enable_gqa=True
    )
    return out[0].transpose(0, 1).flatten(1)
