"""One ragged decoder for every family: a flat loop over packed linears.

All tokens of a step (prefill chunks, decodes, draft trees) are rows of one matrix; only attention,
which the caller supplies, knows to which sequence a row belongs. The residual stream is float32
(float64 for float64 weights). The class of numerics is the weight set's: *fast* uses the fewest
operations, *pinned* gives a row the same bits whatever rows come with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.block import Enter, Rotation, torch_block
from workbench.models.compiled import compiled_block, is_compiled
from workbench.models.compiled_join import compiled_norm
from workbench.models.config import ModelConfig
from workbench.models.gated import fast_gated, pinned_gated
from workbench.models.norms import fast_norm, pinned_norm
from workbench.models.rope import RopeTable
from workbench.models.weightset import WeightSet


class Attend(Protocol):
    """Writes K and V of a layer wherever they are kept, and attends."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Give [T, Hq * D] from scaled, rotated ``q`` [T, Hq, D], rotated ``k`` and ``v`` [T, Hkv, D]."""
        ...


@dataclass(frozen=True)
class ForwardOut:
    """``logits`` [R, V] and their ``hidden`` [R, H] (after the final norm) in the residual dtype; ``streams``
    [R, H] before it.

    ``captured[i]`` [T, H] is the residual stream entering layer ``i``; ``i = num_layers`` is the
    stream before the final norm.
    """

    logits: Tensor
    hidden: Tensor
    streams: Tensor
    captured: Mapping[int, Tensor] = field(default_factory=dict)


class Decoder:
    """A model bound to one weight set. Run it under ``torch.inference_mode``."""

    def __init__(self, config: ModelConfig, weights: WeightSet) -> None:
        self.config = config
        self.weights = weights
        dtype, device = weights.residual_dtype, weights.device
        self._tables = {
            kind: RopeTable(spec, config.head_dim, config.max_position, dtype, device)
            for kind, spec in config.rope
        }
        self._pinned = weights.numerics == "pinned"
        norm = pinned_norm if self._pinned else fast_norm
        gated = (pinned_gated if self._pinned else fast_gated)(config.activation)
        # Compiled blocks turn and scale by themselves; the torch form takes rotations laid out for all heads.
        self._compiled = is_compiled(weights, config)
        self._blocks = [
            compiled_block(layer, config) if self._compiled else torch_block(layer, config, norm, gated)
            for layer in weights.layers
        ]
        final = partial(compiled_norm, weights.layers[0].qkv.native.kernels) if self._compiled else norm
        self._final_norm = final(weights.final_gain, config.norm_eps)
        # Scales q (not k) inside the rotation, which costs nothing per layer.
        scale = torch.ones((1, config.num_heads + config.num_kv_heads, 1), dtype=dtype, device=device)
        scale[:, : config.num_heads] = config.query_scale
        self._head_scale = scale
        root = torch.tensor(config.hidden_size**0.5, dtype=torch.float64).to(weights.dtype)
        self._embed_scale = float(root) if config.scale_embedding else None

    @property
    def table_nbytes(self) -> int:
        """Bytes of the rotary tables built so far, and of the scale of each head."""
        return sum(t.nbytes for t in self._tables.values()) + self._head_scale.untyped_storage().nbytes()

    def reserve(self, length: int) -> None:
        """Build the rotary tables for positions below ``length``, so that their bytes do not grow later."""
        for table in self._tables.values():
            table.reserve(length)

    def turns(self, highest: int) -> Tensor:
        """Cosines and signed sines [L, 2, D] by position, ``highest`` included, of a model with one rotary
        embedding. Raises ``PromptTooLong`` beyond the context limit."""
        (table,) = self._tables.values()
        return table.rows(highest)

    @property
    def embed_scale(self) -> float:
        """What embeddings are multiplied with."""
        return 1.0 if self._embed_scale is None else self._embed_scale

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
        """Run int64 ``ids`` [T] at int64 ``positions`` [T]; logits for ``logits_rows`` [R], or all rows.

        ``capture`` names layers whose input is wanted. Behind the attention of the last layer only rows with
        logits go on, unless its output is captured. Raises ``PromptTooLong`` for a position beyond the
        context limit. ``layers``: those that are run, all by default; final norm and head follow the last of
        them. ``states`` [T, H]: the stream that enters ``layers``, in place of the embeddings of ``ids``.
        ``highest``: no position is beyond it, where that is known without reading them from the device.
        """
        hidden = self.embed(ids) if states is None else states
        return self._layers(hidden, positions, attend, logits_rows, capture, layers=layers, highest=highest)

    def _layers(
        self,
        hidden: Tensor,
        positions: Tensor,
        attend: Attend,
        logits_rows: Tensor | None,
        capture: Collection[int],
        first: Enter | None = None,
        layers: range | None = None,
        highest: int | None = None,
    ) -> ForwardOut:
        """Blocks (all, or ``layers``) on the stream ``hidden`` [T, H]; ``first`` in place of the first one's
        entrance."""
        rotations = self._rotations(positions, highest)
        captured: dict[int, Tensor] = {}
        layers = range(len(self._blocks)) if layers is None else layers
        last = layers[-1]
        early = logits_rows is not None and last + 1 not in capture
        for index in layers:
            block = self._blocks[index]
            if index in capture:
                captured[index] = hidden
            enter = block.enter if first is None or index else first
            q, k, v = enter(hidden, rotations[self.config.layer_types[index]])
            keep = logits_rows if early and index == last else None
            hidden = block.leave(attend(index, q, k, v), hidden, keep)
        if last + 1 in capture:
            captured[last + 1] = hidden
        if logits_rows is not None and not early:
            hidden = hidden.index_select(0, logits_rows)
        stream, hidden = hidden, self._final_norm(hidden)
        return ForwardOut(self.logits(hidden), hidden, stream, captured)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [T, H] of int64 ``ids`` [T], scaled as the family asks."""
        rows = F.embedding(ids, self.weights.embed).to(self.weights.residual_dtype)
        return rows if self._embed_scale is None else rows * self._embed_scale

    def final_norm(self, stream: Tensor) -> Tensor:
        """What the head is given [R, H], from the stream [R, H] that leaves the last layer."""
        return self._final_norm(stream)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden rows [R, H] that passed the final norm."""
        logits = self.weights.head.fn(hidden)
        cap = self.config.final_softcap
        if cap is None:
            return logits
        if self._pinned:  # a row alone: tanh rounds differently at the end of a vector
            return torch.cat([torch.tanh(row / cap) * cap for row in torch.split(logits, 1)])
        return torch.tanh(logits / cap) * cap

    def _rotations(self, positions: Tensor, highest: int | None = None) -> dict[str, Rotation]:
        """Cosines and signed sines of each rotary embedding.

        [T, Hq + Hkv, D], query scale included; for compiled blocks [T, D], as the table has them.
        """
        highest = int(positions.max()) if highest is None else highest
        rotations = {}
        for kind, table in self._tables.items():
            cos, sin = table.gather(positions, highest)
            if not self._compiled:
                cos, sin = cos[:, None] * self._head_scale, sin[:, None] * self._head_scale
            rotations[kind] = (cos, sin)
        return rotations
