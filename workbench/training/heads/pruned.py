"""Layers of a model as parameters to train: what the engine computes, from operations with gradients.

Names and forms are those of the model's own checkpoint, and a layer is read and bound as the engine's are
(:func:`~workbench.models.weightset.read_layer`, :func:`~workbench.models.block.torch_block`), so norms of
heads, biases and windows of every family are what they are there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.models.block import Block, Rotation, torch_block
from workbench.models.config import ModelConfig
from workbench.models.gated import ACTIVATIONS, Gated
from workbench.models.norms import Norm
from workbench.models.packed import PackedLinear
from workbench.models.rope import RopeTable
from workbench.models.source import Source
from workbench.models.weightset import Pack, Reader, read_layer
from workbench.spec.errors import MissingTensor, UnsupportedModel
from workbench.speculative.distilled import FINAL
from workbench.training.heads.unroll import Batch


def layer_tensors(source: Source, kept: Sequence[int]) -> dict[str, Tensor]:
    """Layers of a checkpoint and its last norm, float32, numbered anew."""
    out = {FINAL: source.tensor(FINAL).float()}
    for new, old in enumerate(kept):
        base = f"model.layers.{old}."
        for name in source.names():
            if name.startswith(base):
                out[f"model.layers.{new}.{name.removeprefix(base)}"] = source.tensor(name).float()
    return out


@dataclass(frozen=True)
class _Live:
    """A :class:`Source` over parameters: what is read of it can be trained."""

    config: ModelConfig
    held: Mapping[str, Tensor]
    fingerprint: str = ""
    nbytes: int = 0

    def names(self) -> Collection[str]:
        return self.held.keys()

    def tensor(self, name: str) -> Tensor:
        if name not in self.held:
            raise MissingTensor(f"The layers in training lack {name!r}.", hint="Check the configuration.")
        return self.held[name]


class Pruned(nn.Module):
    """``precision``: what matrices are multiplied in (None: as they are kept). ``config``: of these layers.

    Raises :class:`UnsupportedModel` for a model that caps its attention scores.
    """

    def __init__(
        self, config: ModelConfig, tensors: Mapping[str, Tensor], precision: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if config.attn_softcap is not None:
            raise UnsupportedModel(
                "Layers that cap their attention scores are not trained here.",
                hint="Train an EAGLE head for this model.",
            )
        self.config, self.precision = config, precision
        self._names = {name: name.replace(".", "_") for name in tensors}
        for name, plain in self._names.items():
            self.register_parameter(plain, nn.Parameter(tensors[name].clone()))
        self._tables = {
            kind: RopeTable(spec, config.head_dim, config.max_position, torch.float32)
            for kind, spec in config.rope
        }

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their names in a checkpoint."""
        return {name: getattr(self, plain).detach() for name, plain in self._names.items()}

    def forward(self, embedded: Tensor, batch: Batch) -> Tensor:
        """What the vocabulary matrix is given [N, H] at the answers' rows, of inputs [C, H] of all rows."""
        config = self.config
        hidden, last = embedded, config.num_layers - 1
        for index, block in enumerate(self.blocks()):
            q, k, v = block.enter(hidden, self.rotation(index, batch.positions))
            out = attended(q * config.query_scale, k, v, batch, config.window(index))
            hidden = block.leave(out, hidden, batch.answers if index == last else None)
        return self.norm(hidden)

    def blocks(self) -> Iterator[Block]:
        """The layers, over the parameters as they are now."""
        held = {name: getattr(self, plain) for name, plain in self._names.items()}
        config, device = self.config, next(iter(held.values())).device
        reader = Reader(_Live(config, held), torch.float32, device)
        for index in range(config.num_layers):
            layer = read_layer(reader, self._pack(), index)
            yield torch_block(layer, config, _norm, _gated(config.activation))

    def norm(self, hidden: Tensor) -> Tensor:
        """The last norm."""
        config, gain = self.config, getattr(self, self._names[FINAL])
        held = Reader(_Live(config, {FINAL: gain}), torch.float32, gain.device)
        return _norm(held.gain(FINAL, config.hidden_size), config.norm_eps)(hidden)

    def rotation(self, index: int, positions: Tensor) -> Rotation:
        """Cosines and sines for a layer's rows [T] at ``positions``."""
        cos, sin = self._tables[self.config.layer_types[index]].gather(positions, int(positions.max()))
        return cos[:, None], sin[:, None]

    def _pack(self) -> Pack:
        precision = self.precision

        def pack(name: str, weight: Tensor, bias: Tensor | None) -> PackedLinear:
            kept = weight if precision is None else weight.to(precision)
            added = None if bias is None else bias.to(kept.dtype)
            return PackedLinear(
                lambda x: F.linear(x.to(kept.dtype), kept, added), *weight.shape, "training", ()
            )

        return pack


def _norm(gain: Tensor, eps: float) -> Norm:
    return lambda x: F.rms_norm(x, x.shape[-1:], None, eps) * gain


def _gated(activation: str) -> Gated:
    function = ACTIVATIONS[activation]

    def product(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return function(gate) * up

    return product


def attended(q: Tensor, k: Tensor, v: Tensor, batch: Batch, window: int | None) -> Tensor:
    """[C, Hq * D] of scaled queries [C, Hq, D]: every row sees its conversation up to itself."""
    count, longest = len(batch.shown), batch.longest
    at = batch.conversation * longest + batch.positions

    def laid(rows: Tensor) -> Tensor:
        wide = rows.new_zeros(count * longest, *rows.shape[1:]).index_copy(0, at, rows)
        return wide.view(count, longest, *rows.shape[1:]).transpose(1, 2)

    seen = None
    if window is not None and window < longest:
        row = torch.arange(longest)
        seen = (row[None] <= row[:, None]) & (row[None] > row[:, None] - window)
    mixed = F.scaled_dot_product_attention(
        laid(q), laid(k), laid(v), attn_mask=seen, is_causal=seen is None, scale=1.0, enable_gqa=True
    )
    return mixed.transpose(1, 2).flatten(0, 1)[at].flatten(1)
