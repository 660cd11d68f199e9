"""A draft model distilled from its target: layers of its own in a file, the target's embedding.

The file holds what a checkpoint of so many layers would, but for the embedding, which is the target's and is
never stored: names, norms and biases are those of the target's family. It drafts from the tokens that the
model says often (FR-Spec, arXiv 2502.14856): q is 0 elsewhere, and verification gives those tokens back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from workbench.models.coded_head import STEP, decoded
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.head_layers import HeadTensors, head_weights
from workbench.models.heads import HeadFile, find_head
from workbench.models.packed import held_nbytes
from workbench.models.source import DictSource
from workbench.models.weightset import Pack, Reader, read_layer
from workbench.spec.errors import HeadMismatch, MissingTensor, WrongShape
from workbench.speculative.head_facts import drafted_ids, require_weights

KIND = "draft"
FINAL = "model.norm.weight"


def kept_config(config: ModelConfig, kept: Sequence[int]) -> ModelConfig:
    """The configuration of a model of those layers of another."""
    types = tuple(config.layer_types[i] for i in kept)
    rope = tuple((kind, spec) for kind, spec in config.rope if kind in types)
    return replace(config, num_layers=len(kept), layer_types=types, rope=rope, mtp_modules=0)


def begun_layers(head: HeadFile, layers: int) -> tuple[int, ...]:
    """Which of a target's ``layers`` each layer of the file began as. Raises :class:`HeadMismatch`."""
    found = head.facts.get("begun")
    if not isinstance(found, list) or not found or not all(_layer(n, layers) for n in found):
        raise HeadMismatch(
            f"The draft model {head.path} began as the layers {found!r}; the model has {layers}.",
            hint="Train it again for this model: 'workbench train draft'",
        )
    return tuple(found)


def find_distilled(model: str, fingerprint: str, layers: int) -> HeadFile:
    """The draft model of a model of ``layers`` layers. Raises :class:`MissingHead`, :class:`HeadMismatch`."""
    head = find_head(model, KIND, fingerprint)
    begun_layers(head, layers)
    return head


def _layer(n: object, layers: int) -> bool:
    return isinstance(n, int) and 0 <= n < layers


def distilled_decoder(
    head: HeadFile, vocab: int, target: Decoder, pack: Pack
) -> tuple[Decoder, Tensor | None]:
    """The draft model on its target, and the ids int64 [n] of its logits (None: all of them).

    Raises :class:`HeadMismatch` for other weights or sizes.
    """
    require_weights(head, target)
    config, weights = kept_config(target.config, begun_layers(head, target.config.num_layers)), target.weights
    stored = head.tensors()
    missing = [name for name in stored if name.endswith(STEP) and name.removesuffix(STEP) not in stored]
    if missing:
        raise HeadMismatch(f"{missing[0]} of {head.path} belongs to no matrix.", hint="Train it again.")
    tensors = decoded(stored)
    reader = Reader(DictSource(config, tensors), weights.residual_dtype, weights.device)
    try:
        layers = tuple(read_layer(reader, pack, i) for i in range(config.num_layers))
        gain = reader.gain(FINAL, config.hidden_size)
    except (MissingTensor, WrongShape) as error:
        raise HeadMismatch(
            f"The draft model {head.path} does not fit its target: {error.message}", hint="Train it again."
        ) from None
    ids = drafted_ids(HeadTensors(tensors, str(head.path), weights), vocab, target)
    return Decoder(config, head_weights(target, layers, gain, ids, pack)), ids


def own_nbytes(made: Decoder, target: Decoder) -> int:
    """Bytes that a draft model holds beside its target's: layers, rows of the output matrix, tables."""
    weights = made.weights
    linears = [x for layer in weights.layers for x in layer.linears]
    linears += [] if weights.head is target.weights.head else [weights.head]
    gains = [g for layer in weights.layers for g in layer.gains]
    return held_nbytes(linears, [*gains, weights.final_gain]) + made.table_nbytes
