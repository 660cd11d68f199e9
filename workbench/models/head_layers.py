"""From a head file to layers: shape-checked tensors, packed as the target's are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from workbench.models.config import FULL, ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.norms import Norm, fast_norm, pinned_norm
from workbench.models.weightset import GATE_UP, HEAD, LayerWeights, Pack, WeightSet
from workbench.spec.errors import HeadMismatch


def head_config(target: ModelConfig, layers: int) -> ModelConfig:
    """Layers of the target's sizes that see all keys, without its norms of queries and keys and biases."""
    kind = FULL if FULL in dict(target.rope) else target.layer_types[0]
    return replace(
        target,
        num_layers=layers,
        layer_types=(kind,) * layers,
        rope=((kind, target.rope_of(kind)),),
        qk_norm=False,
        sandwich_norms=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        norm_offset=0.0,
    )


class HeadTensors:
    """Shape-checked access to the tensors of a head file, in a weight set's residual dtype and place."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str, target: WeightSet) -> None:
        self._tensors, self.name = tensors, name
        self.dtype, self.device = target.residual_dtype, target.device

    def get(self, key: str, *shape: int) -> Tensor:
        """A tensor as stored. Raises :class:`HeadMismatch` when it is missing or of another shape."""
        found = self._tensors.get(key)
        if found is None or tuple(found.shape) != shape:
            is_there = "is missing" if found is None else f"has shape {tuple(found.shape)}, not {shape}"
            raise HeadMismatch(
                f"{key} of the head {self.name} {is_there}.", hint="Train it again for this model."
            )
        return found

    def wide(self, key: str, *shape: int) -> Tensor:
        """A gain or a bias in the residual dtype."""
        return self.get(key, *shape).to(self.device, self.dtype)

    def has(self, key: str) -> bool:
        """Whether the file has it."""
        return key in self._tensors

    def layer(self, index: int, config: ModelConfig, pack: Pack, *, width: int = 0) -> LayerWeights:
        """A layer; q, k and v read ``width`` inputs (0: the hidden size). No input norm counts as ones."""
        base, hidden, inner = f"layers.{index}", config.hidden_size, config.intermediate_size
        width = width or hidden
        sizes = {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
        qkv = [self.get(f"{base}.self_attn.{n}_proj.weight", size, width) for n, size in sizes.items()]
        gate_up = [self.get(f"{base}.mlp.{n}_proj.weight", inner, hidden) for n in ("gate", "up")]
        norm = f"{base}.input_layernorm.weight"
        ones = torch.ones(hidden, dtype=self.dtype, device=self.device)
        return LayerWeights(
            qkv=pack(f"{base}.self_attn.qkv_proj", torch.cat(qkv), None),
            o=pack(
                f"{base}.self_attn.o_proj",
                self.get(f"{base}.self_attn.o_proj.weight", hidden, config.q_size),
                None,
            ),
            gate_up=pack(f"{base}.{GATE_UP}", torch.cat(gate_up), None),
            down=pack(f"{base}.mlp.down_proj", self.get(f"{base}.mlp.down_proj.weight", hidden, inner), None),
            attn_gain=self.wide(norm, hidden) if self.has(norm) else ones,
            mlp_gain=self.wide(f"{base}.post_attention_layernorm.weight", hidden),
        )

    def ids(self) -> Tensor:
        """Ids that were drafted in training, the most frequent first, as stored."""
        found = self._tensors["ids"]
        if found.ndim != 1 or found.is_floating_point():
            raise HeadMismatch(f"ids of the head {self.name} are no list of tokens.", hint="Train it again.")
        return found

    def gain(self, gain: Tensor, config: ModelConfig, numerics: str) -> Norm:
        """A norm of the hidden size by its gain."""
        return (pinned_norm if numerics == "pinned" else fast_norm)(gain, config.norm_eps)


def head_weights(
    target: Decoder,
    layers: tuple[LayerWeights, ...],
    final_gain: Tensor | None,
    ids: Tensor | None,
    pack: Pack,
) -> WeightSet:
    """The weight set of a head: the target's embedding, and of its output matrix the rows ``ids``, or all.

    Rows can only be taken where the output matrix is the embedding.
    """
    weights = target.weights
    head = weights.head
    if ids is not None and target.config.tie_embeddings:
        head = pack(HEAD, weights.embed.index_select(0, ids), None)
    gain = weights.final_gain if final_gain is None else final_gain
    return replace(weights, layers=layers, head=head, final_gain=gain, method="plain")
