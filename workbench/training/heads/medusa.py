"""Training Medusa heads (arXiv 2401.10774, Medusa-1: the target stays as it is).

Head k learns the law of the token k behind the next one, weighted 0.8^k, over the tokens that the model says
often; its rows of the vocabulary matrix are the target's and frozen, or begin as those and learn with it.
The form of a head is told in :mod:`workbench.speculative.medusa`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.models.coded_head import encoded
from workbench.models.decoder import Decoder
from workbench.models.source import Source
from workbench.speculative.medusa import head_states
from workbench.training.heads.distil import distilled
from workbench.training.heads.losses import LossName
from workbench.training.heads.rows import Rows
from workbench.training.heads.unroll import before

WEIGHT = 0.8


@dataclass(frozen=True)
class Shape:
    """``heads``; ``rank`` of each (0: half the model's width); ``vocab`` tokens that the loss is over.

    ``own_rows``: each head has rows of its own for those tokens, and drafts no other.
    """

    heads: int = 4
    rank: int = 0
    vocab: int = 4096
    loss: LossName = "kl"
    own_rows: bool = False

    def width(self, hidden: int) -> int:
        """Rank of each, of a model so wide."""
        return self.rank or hidden // 2


class MedusaHeads(nn.Module):
    """``down`` [K, R, H] and ``up`` [K, H, R], which starts at zero: a new head says what the model says.

    ``rows`` [K, V', H]: its own rows of the vocabulary, which begin as the model's (None: the model's).
    """

    def __init__(self, shape: Shape, hidden: int, seed: int = 0, rows: Tensor | None = None) -> None:
        super().__init__()
        rank = shape.width(hidden)
        generator = torch.Generator().manual_seed(seed)
        down = torch.randn(shape.heads, rank, hidden, generator=generator) / hidden**0.5
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(torch.zeros(shape.heads, hidden, rank))
        own = None if rows is None else nn.Parameter(rows.float().expand(shape.heads, -1, -1).clone())
        self.register_parameter("rows", own)

    def forward(self, z: Tensor) -> Tensor:
        """States [n, K, H] that go to the vocabulary matrix, of ``z`` [n, H]."""
        return head_states(z, self.down, self.up)

    def stored(self) -> dict[str, Tensor]:
        """What a file holds: bfloat16, and eight bits for everything where heads have rows of their own."""
        tensors = {name: p.detach() for name, p in self.named_parameters()}
        return (
            encoded(tensors)
            if self.rows is not None
            else {n: t.to(torch.bfloat16) for n, t in tensors.items()}
        )

    def logits(self, z: Tensor, matrix: Tensor) -> Tensor:
        """[n, K, V'] of ``z`` [n, H], in the precision of the model's rows ``matrix`` [V', H]."""
        states = self(z).to(matrix.dtype)
        if self.rows is None:
            return F.linear(states, matrix).to(z.dtype)
        rows = self.rows.to(matrix.dtype)
        return torch.bmm(states.transpose(0, 1), rows.mT).transpose(0, 1).to(z.dtype)


class MedusaLoss:
    """The loss of batches of conversations, for :func:`~workbench.training.heads.optimise.optimise`."""

    def __init__(
        self,
        model: MedusaHeads,
        shape: Shape,
        decoder: Decoder,
        matrix: Tensor,
        ids: Tensor,
        rows: Sequence[Rows],
    ) -> None:
        self.model, self.shape, self.decoder, self.rows = model, shape, decoder, rows
        self.kept = ids[: shape.vocab].long()
        self.matrix = matrix.index_select(0, self.kept).to(decoder.weights.dtype)
        self.place = torch.full((matrix.shape[0],), -1).scatter_(0, self.kept, torch.arange(len(self.kept)))

    def __call__(self, numbers: Sequence[int], share: float) -> tuple[Tensor, int]:
        """Weighted mean over heads and rows, and the number of tokens predicted by all heads.

        What head k gives is laid at the row whose law it answers for, k + 1 rows on: the law of a row is then
        made once for all heads, and never of all rows together (:mod:`.distil`).
        """
        batch = [self.rows[i] for i in numbers]
        z = normed(self.decoder, torch.cat([r.stream for r in batch]))
        following = torch.cat([r.following for r in batch])
        wanted = torch.where(following >= 0, self.place[following.clamp_min(0)], -1)
        before_it = torch.cat([torch.arange(len(r.following)) for r in batch])
        heads = range(self.shape.heads)
        counted = torch.stack([(wanted >= 0) & (before_it > k) for k in heads])
        by_head = torch.tensor([WEIGHT ** (k + 1) for k in heads]) * counted.any(1)
        weights = counted * (by_head / by_head.sum().clamp_min(1e-9) / counted.sum(1).clamp_min(1))[:, None]
        states = self.model(z)
        laid = [before(states[:, k], k + 1) for k in heads]
        total = distilled(
            laid,
            z,
            self.matrix,
            wanted.clamp_min(0),
            weights.to(z.dtype),
            self.shape.loss,
            share,
            self.model.rows,
        )
        return total, int(counted.sum())

    def likeliest(self, z: Tensor, width: int) -> Tensor:
        """Tokens [n, K, width] that each head finds likeliest, of those that the loss is over."""
        return self.kept[self.model.logits(z, self.matrix).topk(min(width, len(self.kept)), -1).indices]


def normed(decoder: Decoder, stream: Tensor) -> Tensor:
    """What heads read [n, H], from stored streams [n, H]."""
    with torch.no_grad():
        return decoder.final_norm(stream.to(decoder.weights.residual_dtype)).float()


def vocabulary_matrix(source: Source) -> Tensor:
    """The target's output matrix [V, H], as stored."""
    tied = source.config.tie_embeddings
    return source.tensor("model.embed_tokens.weight" if tied else "lm_head.weight")
