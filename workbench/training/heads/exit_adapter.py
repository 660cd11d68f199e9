"""Training an early exit of the target: a norm and a residual H x H in front of its own last norm and head.

Mirror Speculative Decoding (arXiv 2510.13161) needs what an intermediate layer would say; the logit lens
alone says little. The adapter learns the law of the last layer (KL), over the tokens that the model says
often, from streams entering two layers: the exit's and the last norm's. It starts as the logit lens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.models.decoder import Decoder
from workbench.speculative.placement.early_exit import ExitAdapter
from workbench.training.heads.distil import distilled
from workbench.training.heads.rows import Shown


class ExitHead(nn.Module):
    """x -> x + matrix · norm(x): [N, H] to [N, H], in front of the target's last norm."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(width))
        self.matrix = nn.Parameter(torch.zeros(width, width))

    def forward(self, stream: Tensor) -> Tensor:
        """The stream that the target's last norm is given."""
        return stream + F.linear(F.rms_norm(stream, self.gain.shape, self.gain, self.eps), self.matrix)

    def adapter(self) -> ExitAdapter:
        """What serves."""
        return ExitAdapter(self.gain.detach().clone(), self.matrix.detach().clone())


class ExitLoss:
    """The loss of batches of conversations, for :func:`~workbench.training.heads.optimise.optimise`.

    ``shown``: two streams each, those entering the exit's layer and the last norm; ``matrix`` [V, H] the
    target's vocabulary matrix, ``ids`` [V'] the tokens of the loss.
    """

    def __init__(
        self, model: ExitHead, decoder: Decoder, matrix: Tensor, ids: Tensor, shown: Sequence[Shown]
    ) -> None:
        self.model, self.shown = model, shown
        self.matrix = matrix.index_select(0, ids.long()).to(decoder.weights.dtype)
        self._dtype = decoder.weights.residual_dtype
        self._gain = decoder.weights.final_gain.detach().clone()
        self._eps = decoder.config.norm_eps

    def __call__(self, numbers: Sequence[int], share: float) -> tuple[Tensor, int]:
        """KL(target, exit) in nats, the mean of rows; and how many there are."""
        early, last = self._rows([self.shown[i] for i in numbers])
        states, target = self._leave(self.model(early)), self._leave(last)
        weights = torch.full((1, len(early)), 1 / len(early), dtype=states.dtype)
        nobody = torch.zeros(len(early), dtype=torch.int64)
        return distilled([states], target, self.matrix, nobody, weights, "kl", share), len(early)

    @torch.no_grad()
    def hits(self, shown: Sequence[Shown], ranks: Sequence[int]) -> dict[int, float]:
        """By rank k the share of rows whose target's likeliest token is among the exit's k likeliest."""
        early, last = self._rows(shown)
        wanted = self._logits(self._leave(last)).argmax(-1, keepdim=True)
        said = self._logits(self._leave(self.model(early)))
        place = (said > said.gather(-1, wanted)).sum(-1)
        return {k: float((place < k).float().mean()) for k in ranks}

    def _rows(self, shown: Sequence[Shown]) -> tuple[Tensor, Tensor]:
        """Streams [N, H] of all rows that a draft may come behind: the prompt's last token and later ones."""
        early, last = (
            torch.cat([s.streams[i][s.begin - 1 :] for s in shown]).to(self._dtype) for i in range(2)
        )
        return early, last

    def _leave(self, stream: Tensor) -> Tensor:
        return F.rms_norm(stream, self._gain.shape, self._gain, self._eps)

    def _logits(self, states: Tensor) -> Tensor:
        return F.linear(states.to(self.matrix.dtype), self.matrix).to(states.dtype)
