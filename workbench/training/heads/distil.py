"""The loss of a drafter's rows against the target's law, without ever holding all logits.

Logits of thousands of rows for thousands of tokens would be the largest thing a step has. They are made a few
hundred rows at a time, and what goes back through them is worked out at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.training.heads.losses import LossName, loss_of

ROWS = 256


class _Summed(torch.autograd.Function):
    """Σ weights · loss; the gradient of the states is made on the way."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        states: Tensor,
        targets: Tensor,
        matrix: Tensor,
        wanted: Tensor,
        weights: Tensor,
        name: LossName,
        share: float,
    ) -> Tensor:
        gradient = torch.zeros_like(states)
        total = torch.zeros((), dtype=torch.float64)
        for begin in range(0, states.shape[1], ROWS):
            rows = slice(begin, begin + ROWS)
            law = _logits(targets[rows], matrix).softmax(-1)
            for step in range(states.shape[0]):
                weight = weights[step, rows]
                if not bool(weight.any()):
                    continue
                with torch.enable_grad():
                    logits = _logits(states[step, rows], matrix).requires_grad_()
                    each = (loss_of(name, logits, wanted[rows], law, share) * weight).sum()
                (back,) = torch.autograd.grad(each, logits)
                gradient[step, rows] = (back.to(matrix.dtype) @ matrix).to(states.dtype)
                total += each.detach().double()
        ctx.save_for_backward(gradient)
        return total.to(states.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * grad, None, None, None, None, None, None


def _logits(states: Tensor, matrix: Tensor) -> Tensor:
    return F.linear(states.to(matrix.dtype), matrix).to(states.dtype)


def distilled(
    states: Sequence[Tensor],
    targets: Tensor,
    matrix: Tensor,
    wanted: Tensor,
    weights: Tensor,
    name: LossName,
    share: float,
) -> Tensor:
    """Σ over steps and rows of ``weights`` [J, N] times the loss ``name`` (:mod:`.losses`).

    ``states``: J of [N, H], as the vocabulary matrix takes them; ``targets`` [N, H]: the target's own, the
    same at every step, as a row has one law; ``matrix`` [V', H]: rows of the drafted tokens; ``wanted`` [N]:
    places among them of the tokens that came, of weight 0 where there is none.
    """
    out: Tensor = _Summed.apply(torch.stack(list(states)), targets, matrix, wanted, weights, name, share)  # type: ignore[no-untyped-call]
    return out
