"""One row per position: all layers and KV heads side by side, keys without their rotary embedding.

arXiv 2511.01815, section 3: what repeats across layers and heads of one token is what a basis can find, so
per-head bases lose most of the gain; and keys share directions only before RoPE, so it is undone at each
key's true position, with the model's own frequencies (every kind; length-dependent ones are resolved by the
context limit). Cached keys are canonical: norms of q and k, where a family has them, came before.

Layers of a sliding window keep no old positions, so they have no place in such a row and are left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.models.config import FULL, ModelConfig
from workbench.models.rope import RopeTable, apply_rope, frequencies
from workbench.spec.errors import UnsupportedModel, WrongShape


class JointRows:
    """Joins rows of the full-attention layers of a model, and takes them apart again.

    ``layers`` are their numbers; a joint row has ``features`` = layers x KV heads x head size elements, in
    that order. Raises :class:`UnsupportedModel` for a model without full-attention layers.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.layers = tuple(i for i in range(config.num_layers) if config.window(i) is None)
        if not self.layers:
            raise UnsupportedModel(
                "kvtc codes layers that keep every position, and this model has sliding windows only.",
                hint="Its cache is never longer than the window: keep it as it is.",
            )
        self.num_layers, self.heads, self.dim = config.num_layers, config.num_kv_heads, config.head_dim
        self.window = config.sliding_window
        self.limit = config.max_position
        spec = config.rope_of(FULL) if any(name == FULL for name, _ in config.rope) else config.rope[0][1]
        self._scale = spec.attention_factor
        self._table = RopeTable(spec, self.dim, self.limit, torch.float32)
        digest = hashlib.blake2b(frequencies(spec, self.dim, self.limit).numpy().tobytes(), digest_size=8)
        digest.update(f"{self._scale!r}/{self.layers}/{self.num_layers}/{self.heads}/{self.dim}".encode())
        self.key = digest.hexdigest()
        """Digest of the phases and of what a row holds."""

    @property
    def width(self) -> int:
        """Elements of one layer in a row."""
        return self.heads * self.dim

    @property
    def features(self) -> int:
        """Elements of a joint row of keys, or of values."""
        return len(self.layers) * self.width

    def columns(self, layer: int) -> slice:
        """Where a model layer's elements lie in a joint row."""
        at = self.layers.index(layer) * self.width
        return slice(at, at + self.width)

    def check(self, rows: Sequence[Tensor]) -> None:
        """Raises :class:`WrongShape` unless rows of every layer of the model are given, [T, Hkv, D] each."""
        if len(rows) != self.num_layers:
            raise WrongShape(f"Rows of {len(rows)} layers were given; the model has {self.num_layers}.")
        wanted = (len(rows[0]), self.heads, self.dim)
        for layer, x in enumerate(rows):
            if x.shape != wanted:
                raise WrongShape(f"Layer {layer} has rows {tuple(x.shape)}; {wanted} were expected.")

    def values(self, rows: Sequence[Tensor]) -> Tensor:
        """Join rows [T, Hkv, D] of every layer of the model: float32 [T, features]; see :meth:`check`."""
        self.check(rows)
        return torch.stack([rows[i].float() for i in self.layers], 1).flatten(1)

    def keys(self, rows: Sequence[Tensor], positions: Tensor) -> Tensor:
        """As :meth:`values`, of keys cached at ``positions`` int64 [T], with their rotation undone."""
        flat = self.values(rows)
        cos, sin = self.turn(positions)
        inverse = 1 / self._scale**2  # cosines and sines both carry the attention factor
        heads = apply_rope(flat.view(len(flat), -1, self.dim), cos * inverse, -sin * inverse)
        return heads.flatten(1)

    def rotate(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Rows float32 [T, Hkv, D] of one layer, rotated to ``positions`` as the model caches them."""
        return apply_rope(rows, *self.turn(positions))

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, D] of ``positions`` int64 [T], for :func:`apply_rope`."""
        highest = int(positions.max()) if len(positions) else 0
        cos, sin = self._table.gather(positions, highest)
        return cos[:, None], sin[:, None]
