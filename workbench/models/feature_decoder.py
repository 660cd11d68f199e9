"""The layers of a draft head that reads hidden states: a decoder with one more input than ids.

Row s belongs to token x_s and is given the *state* of position s - 1 (zeros for the first token), so that
what is kept for a position depends on tokens up to it and on none behind: pages can be shared by their
tokens. Its output stands for the state of position s, and its logits for the token behind it. Heads differ in
how embedding and state become the first layer's input, which is an :class:`Entrance`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from workbench.models.compiled import native_layer
from workbench.models.compiled_join import compiled_entrance
from workbench.models.config import ModelConfig
from workbench.models.decoder import Attend, Decoder, ForwardOut
from workbench.models.join import Join, joined_linear
from workbench.models.packed import PackedLinear, held_nbytes
from workbench.models.rope import apply_rope
from workbench.models.weightset import WeightSet
from workbench.spec.errors import InvariantError

Stream = Callable[[Tensor, Tensor], Tensor]
"""``embedded`` [T, H], ``states`` [T, H] -> the residual stream [T, H] that enters the first layer."""


@dataclass(frozen=True)
class Joined:
    """Embedding and state side by side.

    ``project`` makes the stream of them, and q, k and v read ``first`` of it (None: normed, as in any layer).
    Without, the state is the stream, and q, k and v read both.
    """

    join: Join
    project: PackedLinear | None = None
    first: Join | None = None


@dataclass(frozen=True)
class Entrance:
    """``stream``: what enters the first layer. ``beside``: what its q, k and v read instead of the normed
    stream, made of ``embedded`` and that stream, both [T, H]. ``held``: the linears it multiplies with.
    ``joined``: the same as data, where it is of that form."""

    stream: Stream
    beside: Stream | None = None
    held: tuple[PackedLinear, ...] = ()
    joined: Joined | None = None

    @classmethod
    def of(cls, joined: Joined, dtype: torch.dtype, *more: PackedLinear) -> Entrance:
        """In the residual ``dtype``; ``more`` linears are held elsewhere in the head."""
        join, first = joined.join, joined.first
        if joined.project is None:
            return cls(lambda embedded, states: states, join, more, joined)
        stream = joined_linear(join, joined.project, dtype)
        beside = None if first is None else lambda embedded, hidden: first(hidden)
        return cls(stream, beside, (joined.project, *more), joined)


class FeatureDecoder(Decoder):
    """A head bound to its target, whose embedding it shares, and perhaps its output matrix."""

    def __init__(
        self, config: ModelConfig, weights: WeightSet, entrance: Entrance, *, normed: bool = True
    ) -> None:
        super().__init__(config, weights)
        self.entrance = entrance
        self.normed = normed
        self._qkv = weights.layers[0].qkv.fn
        self._native_enter = self._compiled_enter()
        if not normed:
            self._final_norm = lambda stream: stream

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        logits_rows: Tensor | None = None,
        capture: Collection[int] = (),
        states: Tensor | None = None,
        layers: range | None = None,
        highest: int | None = None,
    ) -> ForwardOut:
        """As :meth:`Decoder.forward`; ``states`` [T, H] belong to the positions before those of the rows."""
        if states is None:
            raise InvariantError("A head that reads hidden states was given none.")
        embedded = self.embed(ids)
        hidden = self.entrance.stream(embedded, states)
        first = partial(self._enter, embedded) if self.entrance.beside is not None else None
        return self._layers(hidden, positions, attend, logits_rows, capture, first, layers, highest)

    def _enter(
        self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first layer's q, k and v, from what the entrance puts beside the stream."""
        if self._native_enter is not None:
            return self._native_enter(embedded, hidden, rotation)
        if self.entrance.beside is None:
            raise InvariantError("This head has an ordinary first layer.")
        config = self.config
        heads, rotated = config.num_heads, config.num_heads + config.num_kv_heads
        qkv = self._qkv(self.entrance.beside(embedded, hidden)).to(hidden.dtype)
        qkv = qkv.view(-1, rotated + config.num_kv_heads, config.head_dim)
        cos, sin = rotation
        if cos.ndim == 2:  # rows of the table, as compiled blocks take them
            cos, sin = cos[:, None] * self._head_scale, sin[:, None] * self._head_scale
        qk = apply_rope(qkv[:, :rotated], cos, sin)
        return qk[:, :heads], qk[:, heads:], qkv[:, rotated:]

    def _compiled_enter(self) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
        """``_enter`` in one call, where the layer is compiled and the entrance of a known form."""
        joined = self.entrance.joined
        if not self._compiled or joined is None or self.entrance.beside is None:
            return None
        native = native_layer(self.weights.layers[0], self.config)
        if joined.first is not None:
            of_stream = compiled_entrance(native, joined.first.gains)
            return lambda embedded, hidden, rotation: of_stream((hidden,), rotation)
        of_both = compiled_entrance(native, joined.join.gains)
        return lambda embedded, hidden, rotation: of_both((embedded, hidden), rotation)

    def own_nbytes(self, target: Decoder) -> int:
        """Bytes held beside the target's: layers, entrance, own rows of the output matrix, tables."""
        linears = [x for layer in self.weights.layers for x in layer.linears]
        linears += [
            *self.entrance.held,
            *([] if self.weights.head is target.weights.head else [self.weights.head]),
        ]
        gains = [g for layer in self.weights.layers for g in layer.gains]
        return held_nbytes(linears, [*gains, self.weights.final_gain]) + self.table_nbytes
