"""Weight sets: everything a decoder multiplies with, packed once and immutable.

Fusing and packing happen only in ``build_weight_set``; cached keys and values stay canonical, so
two weight sets of one model can be toggled without touching anything else. Quantisation methods
supply their own ``pack``; norm gains are never folded, because folding would move a checkpoint off
the grid its weights were quantised on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workbench.models.config import ModelConfig
from workbench.models.packed import PackedLinear, held_nbytes
from workbench.models.progress import Cancel, Progress, check_cancel, report
from workbench.models.source import Source
from workbench.spec.errors import MissingTensor, WrongShape

Numerics = Literal["pinned", "fast"]
Pack = Callable[[str, Tensor, Tensor | None], PackedLinear]
"""``pack(name, weight [n, k], bias [n] or None)``: name is canonical, fused ones end in
``self_attn.qkv_proj`` and ``mlp.gate_up_proj`` (gate rows, then up rows); tensors come in their stored dtype.
A pack may return a ``gated`` linear for the latter."""

HEAD = "lm_head"
GATE_UP = "mlp.gate_up_proj"
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Gains are in the residual dtype, family offset included.

    ``qk_gain`` [Hq + Hkv, D] norms query and key heads together; the sandwich gains norm what
    attention and MLP add to the residual.
    """

    qkv: PackedLinear
    o: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attn_gain: Tensor
    mlp_gain: Tensor
    qk_gain: Tensor | None = None
    attn_out_gain: Tensor | None = None
    mlp_out_gain: Tensor | None = None

    @property
    def linears(self) -> tuple[PackedLinear, ...]:
        """The packed linears in the order they run."""
        return (self.qkv, self.o, self.gate_up, self.down)

    @property
    def gains(self) -> tuple[Tensor, ...]:
        """The norm gains present."""
        gains = (self.attn_gain, self.mlp_gain, self.qk_gain, self.attn_out_gain, self.mlp_out_gain)
        return tuple(g for g in gains if g is not None)


@dataclass(frozen=True)
class WeightSet:
    """All weights of one model under one method, dtype and numerics class.

    ``embed`` is [V, H] in ``dtype``; ``fingerprint`` is the source's.
    """

    layers: tuple[LayerWeights, ...]
    embed: Tensor
    head: PackedLinear
    final_gain: Tensor
    method: str
    dtype: torch.dtype
    numerics: Numerics
    fingerprint: str

    @property
    def residual_dtype(self) -> torch.dtype:
        """float64 for float64 weights, float32 otherwise."""
        return residual_dtype(self.dtype)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.device

    def nbytes(self) -> int:
        """Bytes of the distinct storages held, packed objects included."""
        linears = [linear for layer in self.layers for linear in layer.linears]
        gains = [gain for layer in self.layers for gain in layer.gains]
        return held_nbytes([*linears, self.head], [*gains, self.embed, self.final_gain])

    def kernels(self) -> dict[str, int]:
        """Names of the linear kernels in use, with the number of linears on each."""
        counts: dict[str, int] = {}
        for linear in (*(linear for layer in self.layers for linear in layer.linears), self.head):
            counts[linear.kernel] = counts.get(linear.kernel, 0) + 1
        return counts


def build_weight_set(
    source: Source,
    pack: Pack,
    dtype: torch.dtype,
    numerics: Numerics = "fast",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    *,
    method: str = "plain",
    device: torch.device | str = "cpu",
) -> WeightSet:
    """Read ``source`` layer by layer, fuse, and hand every linear to ``pack``.

    ``progress`` advances with each layer and the head; ``cancel`` is asked before each and raises
    ``Cancelled``. Raises ``MissingTensor`` or ``WrongShape`` naming the tensor.
    """
    config = source.config
    reader = Reader(source, residual_dtype(dtype), torch.device(device))
    total = config.num_layers + 1
    layers = []
    for index in range(config.num_layers):
        check_cancel(cancel, "Building the weight set")
        layers.append(read_layer(reader, pack, index))
        report(progress, (index + 1) / total, f"layer {index}")
    check_cancel(cancel, "Building the weight set")
    embed = reader.get(EMBEDDING, config.vocab_size, config.hidden_size).to(reader.device, dtype)
    weights = WeightSet(
        layers=tuple(layers),
        embed=embed,
        head=pack(HEAD, _head(reader, embed), None),
        final_gain=reader.gain("model.norm.weight", config.hidden_size),
        method=method,
        dtype=dtype,
        numerics=numerics,
        fingerprint=source.fingerprint,
    )
    report(progress, 1.0, "head")
    return weights


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """The residual stream's dtype for weights of ``dtype``."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(frozen=True)
class Reader:
    """Shape-checked access to a source; ``residual`` is the dtype of gains."""

    source: Source
    residual: torch.dtype
    device: torch.device

    @property
    def config(self) -> ModelConfig:
        """Sizes."""
        return self.source.config

    def get(self, name: str, *shape: int) -> Tensor:
        """A tensor as stored. Raises ``MissingTensor`` or ``WrongShape``."""
        tensor = self.source.tensor(name)
        if tuple(tensor.shape) != shape:
            raise WrongShape(
                f"{name} has shape {tuple(tensor.shape)}; the configuration asks for {shape}.",
                hint="config.json does not belong to these weights.",
            )
        return tensor

    def gain(self, name: str, width: int) -> Tensor:
        """A norm's gain, with the family's offset."""
        return self.get(name, width).to(self.device, self.residual) + self.config.norm_offset

    def fused(self, prefix: str, parts: tuple[tuple[str, int], ...], width: int) -> Tensor:
        """The rows of several linears below ``prefix``, one matrix."""
        return torch.cat([self.get(f"{prefix}.{name}.weight", n, width) for name, n in parts])

    def biases(self, prefix: str, parts: tuple[tuple[str, int], ...], present: bool) -> Tensor | None:
        """Their biases, where they have some."""
        if not present:
            return None
        return torch.cat([self.get(f"{prefix}.{name}.bias", n) for name, n in parts])


def read_layer(reader: Reader, pack: Pack, index: int) -> LayerWeights:
    """One decoder layer of the checkpoint, packed."""
    config = reader.config
    base, hidden, inner = f"model.layers.{index}", config.hidden_size, config.intermediate_size
    attn, mlp = f"{base}.self_attn", f"{base}.mlp"

    def linear(
        prefix: str, fused: str, parts: tuple[tuple[str, int], ...], width: int, bias: bool
    ) -> PackedLinear:
        weight = reader.fused(prefix, parts, width)
        return pack(f"{prefix}.{fused}", weight, reader.biases(prefix, parts, bias))

    qkv = (("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size))
    sandwich = config.sandwich_norms
    # Gemma calls the norm before the MLP pre_feedforward, and post_attention the one behind attention.
    mlp_norm = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    return LayerWeights(
        qkv=linear(attn, "qkv_proj", qkv, hidden, config.qkv_bias),
        o=linear(attn, "o_proj", (("o_proj", hidden),), config.q_size, config.o_bias),
        gate_up=linear(
            mlp, "gate_up_proj", (("gate_proj", inner), ("up_proj", inner)), hidden, config.mlp_bias
        ),
        down=linear(mlp, "down_proj", (("down_proj", hidden),), inner, config.mlp_bias),
        attn_gain=reader.gain(f"{base}.input_layernorm.weight", hidden),
        mlp_gain=reader.gain(f"{base}.{mlp_norm}.weight", hidden),
        qk_gain=_qk_gain(reader, attn) if config.qk_norm else None,
        attn_out_gain=reader.gain(f"{base}.post_attention_layernorm.weight", hidden) if sandwich else None,
        mlp_out_gain=reader.gain(f"{base}.post_feedforward_layernorm.weight", hidden) if sandwich else None,
    )


def _qk_gain(reader: Reader, prefix: str) -> Tensor:
    config = reader.config
    query = reader.gain(f"{prefix}.q_norm.weight", config.head_dim).expand(config.num_heads, -1)
    key = reader.gain(f"{prefix}.k_norm.weight", config.head_dim).expand(config.num_kv_heads, -1)
    return torch.cat((query, key))


def _head(reader: Reader, embed: Tensor) -> Tensor:
    """The output head [V, H]: the embedding itself when tied, never anything invented."""
    config = reader.config
    if config.tie_embeddings:
        return embed
    name = f"{HEAD}.weight"
    if name not in reader.source.names():
        raise MissingTensor(
            f"{name} is missing and tie_word_embeddings is false.",
            hint="Complete the checkpoint, or set tie_word_embeddings if the head shares the embedding.",
        )
    return reader.get(name, config.vocab_size, config.hidden_size)
