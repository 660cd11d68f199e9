"""What every trained head with layers is checked for when it meets a model."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.models.decoder import Decoder
from workbench.models.head_layers import HeadTensors
from workbench.models.heads import HeadFile
from workbench.spec.errors import HeadMismatch


def require_weights(head: HeadFile, target: Decoder) -> None:
    """Raises :class:`HeadMismatch` for other weights than those it was trained on."""
    if head.fingerprint != target.weights.fingerprint:
        raise HeadMismatch(
            f"The head {head.path} was trained for other weights.",
            hint=f"Train it again for this model: 'workbench train {head.kind}'",
        )


def shown_layers(head: HeadFile, count: int, layers: int) -> tuple[int, ...]:
    """The layers whose input a head reads, of its facts. Raises :class:`HeadMismatch` for nonsense."""
    found = head.facts.get("features")
    if (
        not isinstance(found, list)
        or len(found) != count
        or not all(isinstance(n, int) and 0 <= n <= layers for n in found)
    ):
        raise HeadMismatch(
            f"The head {head.path} reads the layers {found!r}; the model has {layers}.",
            hint=f"Train it again for this model: 'workbench train {head.kind}'",
        )
    return tuple(found)


def drafted_ids(tensors: HeadTensors, vocab: int, target: Decoder) -> Tensor | None:
    """The ``vocab`` tokens that a head drafts from, int64; None for all of them.

    Rows can be taken of an output matrix that is the embedding; any other is used whole.
    """
    size = target.config.vocab_size
    if not 0 < vocab < size or not target.config.tie_embeddings or not tensors.has("ids"):
        return None
    ids = tensors.ids()[:vocab].to(target.weights.device, torch.int64)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= size:
        raise HeadMismatch(
            f"The head {tensors.name} drafts tokens that the model has not.", hint="Train one for this model."
        )
    return ids
