"""Modules of multi-token prediction as checkpoints hold them: behind the layers, read when asked for.

The layout of DeepSeek-V3 (arXiv 2412.19437, section 2.2) and GLM-4.x: module k is ``model.layers.{L + k}``,
an ordinary layer with ``enorm``, ``hnorm`` and ``eh_proj`` in front and ``shared_head.norm`` behind.
``eh_proj`` reads [enorm(embedding), hnorm(state)], the embedding first (the paper writes it second).
Embedding and head are the main model's; where a checkpoint repeats them, the copies must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from workbench.models.config import FULL, ModelConfig
from workbench.models.layout import EMBED, HEAD
from workbench.models.packed import PackedLinear
from workbench.models.source import Source
from workbench.models.weightset import LayerWeights, Pack, Reader, WeightSet, read_layer
from workbench.spec.errors import HeadMismatch


@dataclass(frozen=True)
class MTPWeights:
    """One module, packed: gains [H] in the residual dtype, ``project`` [H, 2H] and its layer."""

    embed_gain: Tensor
    state_gain: Tensor
    project: PackedLinear
    layer: LayerWeights
    head_gain: Tensor


def mtp_config(config: ModelConfig) -> ModelConfig:
    """The configuration of all modules: layers of the model's sizes that see all keys."""
    kind, count = FULL if FULL in dict(config.rope) else config.layer_types[0], config.mtp_modules
    return replace(
        config, num_layers=count, layer_types=(kind,) * count, rope=((kind, config.rope_of(kind)),)
    )


def read_mtp(source: Source, index: int, pack: Pack, weights: WeightSet) -> MTPWeights:
    """Read module ``index`` of the checkpoint that ``weights`` were built from, and pack it as they are.

    Raises ``MissingTensor`` or ``WrongShape`` naming the tensor, and :class:`HeadMismatch` for a module with
    an embedding or a head of its own.
    """
    config = source.config
    number, hidden = config.num_layers + index, config.hidden_size
    base = f"model.layers.{number}"
    reader = Reader(source, weights.residual_dtype, weights.device)
    for copy, name in ((f"{base}.embed_tokens.weight", EMBED), (f"{base}.shared_head.head.weight", HEAD)):
        _require_shared(source, copy, name)
    return MTPWeights(
        embed_gain=reader.gain(f"{base}.enorm.weight", hidden),
        state_gain=reader.gain(f"{base}.hnorm.weight", hidden),
        project=pack(f"{base}.eh_proj", reader.get(f"{base}.eh_proj.weight", hidden, 2 * hidden), None),
        layer=read_layer(reader, pack, number),
        head_gain=reader.gain(f"{base}.shared_head.norm.weight", hidden),
    )


def _require_shared(source: Source, copy: str, name: str) -> None:
    if copy not in source.names():
        return
    main = EMBED if name == HEAD and source.config.tie_embeddings else name
    if not torch.equal(source.tensor(copy), source.tensor(main)):
        raise HeadMismatch(
            f"The checkpoint's {copy!r} is not its {main!r}.",
            hint="A module shares the model's embedding and head; choose another drafter.",
        )
