"""Training EAGLE heads: what a step's loss is.

*eagle3* learns the target's law alone, at every step of a training-time test, step j weighted 0.8^j; *eagle*
learns the next state (smooth L1) and a tenth of the law, with noise on the states it reads, at one step. Both
over the tokens that the model says often, with the target's own rows of the vocabulary matrix; a row where
the target's likeliest token is none of them does not count. A row counts where a draft could begin or come:
step j from the j-th token of an answer on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.decoder import Decoder
from workbench.models.rope import RopeTable
from workbench.spec.errors import OptionError
from workbench.training.heads.distil import distilled
from workbench.training.heads.drafter import Drafter
from workbench.training.heads.losses import LossName
from workbench.training.heads.rows import Shown
from workbench.training.heads.unroll import Batch, unroll

WEIGHT = 0.8
LAW = 0.1
NOISE = 0.1
"""Half the width of the noise on *eagle*'s states, as a share of their root mean square."""
MOST_STEPS = 7


@dataclass(frozen=True)
class EagleShape:
    """``steps`` of training-time test (*eagle3*) or layers (*fasteagle*); ``vocab`` tokens of the loss."""

    steps: int = 3
    vocab: int = 4096
    loss: LossName = "hybrid"

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MOST_STEPS:
            raise OptionError(
                f"A training-time test of {self.steps!r} steps is not to be had.",
                hint=f"Choose 1 to {MOST_STEPS}.",
            )


class EagleLoss:
    """The loss of batches of conversations, for :func:`~workbench.training.heads.optimise.optimise`."""

    def __init__(
        self,
        model: Drafter,
        shape: EagleShape,
        decoder: Decoder,
        matrix: Tensor,
        ids: Tensor,
        shown: Sequence[Shown],
    ) -> None:
        self.model, self.shape, self.decoder, self.shown = model, shape, decoder, shown
        self.steps = shape.steps if model.form.kind == "eagle3" else 1
        self.kept = ids[: shape.vocab].long()
        self.matrix = matrix.index_select(0, self.kept).to(model.precision or decoder.weights.residual_dtype)
        self.place = torch.full((matrix.shape[0],), -1).scatter_(0, self.kept, torch.arange(len(self.kept)))
        self.table = rotation(decoder)

    def __call__(self, numbers: Sequence[int], share: float) -> tuple[Tensor, int]:
        """Mean over steps, by their weights, and rows; and the number of predictions it is the mean of."""
        batch = Batch.of([self.shown[i] for i in numbers])
        noise = None
        if self.model.form.kind == "eagle":  # the same at every run of the same step
            noise = torch.Generator().manual_seed(round(share * 2**32) + numbers[0])  # it reads 32 bits
        given, target = self.run(batch, self.steps, noise)
        wanted, best = self.place[batch.following()], self.place[batch.best()]
        counted = torch.stack([(best >= 0) & (batch.ahead >= j) for j in range(self.steps)])
        if self.shape.loss == "ce":
            counted &= wanted >= 0
        decay = torch.tensor([WEIGHT**j for j in range(self.steps)], dtype=torch.float64)[:, None]
        weights = counted * decay / (counted.sum(1, keepdim=True).clamp_min(1) * decay.sum())
        outlets = [self.model.outlet(a) for a in given]
        total = distilled(
            outlets, target, self.matrix, wanted.clamp_min(0), weights.to(target), self.shape.loss, share
        )
        if self.model.form.kind == "eagle":
            total = LAW * total + F.smooth_l1_loss(given[0], target)
        return total, int(counted.sum())

    def run(
        self, batch: Batch, steps: int, noise: torch.Generator | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """What the drafter gives at each step, and what the target gives the vocabulary matrix, [N, H]."""
        dtype = self.decoder.weights.residual_dtype
        with torch.no_grad():
            embedded = self.decoder.embed(batch.ids)
            target = self.decoder.final_norm(batch.last(dtype))
            streams = batch.streams(dtype)
            if self.model.form.kind == "eagle":
                streams = [self.decoder.final_norm(streams[0])]
                if noise is not None:
                    size = NOISE * streams[0].square().mean().sqrt()
                    streams = [s + (2 * torch.rand(s.shape, generator=noise) - 1) * size for s in streams]
        given = unroll(self.model, batch, embedded, self.model.fuse(streams[:3]), self.table, steps)
        return given, target


def rotation(decoder: Decoder) -> RopeTable:
    """The rotary table of the target's last layer, for a drafter's."""
    config = decoder.config
    spec = dict(config.rope)[config.layer_types[-1]]
    return RopeTable(spec, config.head_dim, config.max_position, decoder.weights.residual_dtype)
