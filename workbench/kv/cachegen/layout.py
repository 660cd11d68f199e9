"""Which layers a chunk has, how wide they are, and what must agree between two machines that share it.

Keys travel as they are cached, behind their rotary embedding, so the embedding is part of a chunk's identity.
Of layers with a sliding window only the rows that the window still reaches are sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor

from workbench.models.config import ModelConfig
from workbench.models.rope import frequencies
from workbench.spec.errors import WrongShape


class Layout:
    """Geometry of a model's cache."""

    def __init__(self, config: ModelConfig) -> None:
        self.layers, self.heads, self.dim = config.num_layers, config.num_kv_heads, config.head_dim
        self.windows = tuple(config.window(i) for i in range(config.num_layers))
        self.limit = config.max_position
        told = (self.layers, self.heads, self.dim, self.windows, config.layer_types)
        digest = hashlib.blake2b(repr(told).encode(), digest_size=8)
        for layer_type, spec in config.rope:
            digest.update(f"{layer_type}/{spec.attention_factor!r}".encode())
            digest.update(frequencies(spec, self.dim, self.limit).numpy().tobytes())
        self.key = digest.hexdigest()
        """Digest of shapes, windows and phases; a context limit that leaves those alone is not part of it."""

    @property
    def channels(self) -> int:
        """Elements of a token's keys, or values, in one layer."""
        return self.heads * self.dim

    def kept(self, layer: int, begin: int, end: int, context: int) -> int:
        """How many of the rows at positions ``begin`` to ``end`` a context of ``context`` tokens needs."""
        window = self.windows[layer]
        return end - begin if window is None else min(max(end - max(begin, context - window), 0), end - begin)

    def check(self, rows: Sequence[Tensor], tokens: int) -> None:
        """Raises :class:`WrongShape` unless ``rows`` [T, Hkv, D] are those of every layer of the model."""
        if len(rows) != self.layers:
            raise WrongShape(f"Rows of {len(rows)} layers were given; the model has {self.layers}.")
        expected = (tokens, self.heads, self.dim)
        for layer, x in enumerate(rows):
            if tuple(x.shape) != expected:
                raise WrongShape(f"Layer {layer} has rows {tuple(x.shape)}; {expected} were expected.")
