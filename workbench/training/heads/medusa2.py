"""Training Medusa heads together with the model they draft for (arXiv 2401.10774, section 2.2.2, Medusa-2).

The loss is L_LM + λ0 Σ 0.8^k L_k. Without the data that the model was made with, L_LM is self-distillation:
the divergence of the new model's law from the old one's, which the heads learn too. Heads are warmed up
first, the model held still; then both move, the model at a smaller rate. The outcome is another model: what
it says is no longer what the old one said, and how far they are apart is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.decoder import Decoder
from workbench.spec.errors import OptionError
from workbench.training.heads.distil import distilled
from workbench.training.heads.medusa import WEIGHT, MedusaHeads, Shape
from workbench.training.heads.pruned import Pruned
from workbench.training.heads.rows import Shown
from workbench.training.heads.unroll import Batch, before

TOGETHER = 8
"""Conversations whose laws are held at once while they are compared."""


@dataclass(frozen=True)
class JointShape:
    """``heads``, ``rank`` and ``vocab`` as of Medusa-1; ``share`` λ0 of the heads' loss.

    ``warmup``: share of the steps that train the heads alone; ``slower``: the model's share of the learning
    rate.
    """

    heads: int = 4
    rank: int = 0
    vocab: int = 4096
    share: float = 0.2
    warmup: float = 0.3
    slower: float = 0.05

    def __post_init__(self) -> None:
        for name, value in (("share", self.share), ("warmup", self.warmup), ("slower", self.slower)):
            if not 0 <= value <= 1:
                raise OptionError(f"{name} = {value!r} is no share.", hint="Choose a number from 0 to 1.")

    @property
    def own(self) -> Shape:
        """The heads' own shape."""
        return Shape(self.heads, self.rank, self.vocab)


class Joint(nn.Module):
    """A copy of the model's layers, and heads on what leaves them."""

    def __init__(self, backbone: Pruned, heads: MedusaHeads) -> None:
        super().__init__()
        self.backbone, self.heads = backbone, heads


class JointLoss:
    """The loss of batches of conversations, for :func:`~workbench.training.heads.optimise.optimise`.

    ``shown``: the last stream of the old model; ``matrix`` [V, H] stays as it is.
    """

    def __init__(
        self,
        model: Joint,
        shape: JointShape,
        decoder: Decoder,
        matrix: Tensor,
        ids: Tensor,
        shown: Sequence[Shown],
    ) -> None:
        self.model, self.shape, self.decoder, self.shown = model, shape, decoder, shown
        self.kept = ids[: shape.vocab].long()
        self.matrix = matrix.index_select(0, self.kept).to(decoder.weights.dtype)
        self.place = torch.full((matrix.shape[0],), -1).scatter_(0, self.kept, torch.arange(len(self.kept)))

    def __call__(self, numbers: Sequence[int], share: float) -> tuple[Tensor, int]:
        """L_LM + λ0 Σ 0.8^k L_k of means over rows, and how many tokens are predicted by all of them."""
        batch = Batch.of([self.shown[i] for i in numbers])
        with torch.set_grad_enabled(share >= self.shape.warmup):
            z, old = self.states(batch)
        given = self.model.heads(z)
        wanted = self.place[batch.following()]
        heads = range(self.shape.heads)
        counted = torch.stack([wanted >= 0, *((wanted >= 0) & (batch.ahead > k) for k in heads)])
        scale = torch.tensor([1.0, *(self.shape.share * WEIGHT ** (k + 1) for k in heads)])
        weights = counted * (scale / counted.sum(1).clamp_min(1))[:, None]
        laid = [z, *(before(given[:, k], k + 1) for k in heads)]
        total = distilled(laid, old, self.matrix, wanted.clamp_min(0), weights.to(z.dtype), "kl", share)
        return total, int(counted.sum())

    def states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the vocabulary matrix is given [N, H] at the answers' rows, by the new model and the old."""
        dtype = self.decoder.weights.residual_dtype
        with torch.no_grad():
            embedded = self.decoder.embed(batch.ids)
            old = self.decoder.final_norm(batch.last(dtype))
        return self.model.backbone(embedded, batch), old

    def looked(self, shown: Sequence[Shown]) -> dict[str, Any]:
        """Of held-out answers: KL(old, new) in nats over the whole vocabulary, how often both find the same
        token likeliest, and how often each head finds the one that the old model's answer has."""
        sums = dict.fromkeys(("divergence", "same", *(f"top1_{k + 1}" for k in range(self.shape.heads))), 0.0)
        rows = dict.fromkeys(sums, 0)

        def count(name: str, values: Tensor) -> None:
            sums[name] += float(values.double().sum())
            rows[name] += len(values)

        for begin in range(0, len(shown), TOGETHER):
            batch = Batch.of(shown[begin : begin + TOGETHER])
            following = batch.following()
            with torch.no_grad():
                z, old = self.states(batch)
                q, p = (self.decoder.logits(x).log_softmax(-1) for x in (z, old))
                found = self._likeliest(self.model.heads(z))
            count("divergence", (p.exp() * (p - q)).sum(-1))
            count("same", p.argmax(-1) == q.argmax(-1))
            for k in range(self.shape.heads):
                late = batch.ahead > k
                count(f"top1_{k + 1}", before(found[:, k], k + 1)[late] == following[late])
        return {name: round(total / max(1, rows[name]), 5) for name, total in sums.items()}

    def _likeliest(self, given: Tensor) -> Tensor:
        logits = given.to(self.matrix.dtype) @ self.matrix.T
        return self.kept[logits.argmax(-1)]
