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
        own: Tensor | None,
        wanted: Tensor,
        weights: Tensor,
        name: LossName,
        share: float,
    ) -> Tensor:
        gradient = torch.zeros_like(states)
        of_own = None if own is None else torch.zeros_like(own)
        read = matrix if own is None else own.to(matrix.dtype)
        total = torch.zeros((), dtype=torch.float64)
        for begin in range(0, states.shape[1], ROWS):
            rows = slice(begin, begin + ROWS)
            law = _logits(targets[rows], matrix).softmax(-1)
            for step in range(states.shape[0]):
                weight = weights[step, rows]
                if not bool(weight.any()):
                    continue
                said = read if own is None else read[step]
                with torch.enable_grad():
                    logits = _logits(states[step, rows], said).requires_grad_()
                    each = (loss_of(name, logits, wanted[rows], law, share) * weight).sum()
                (back,) = torch.autograd.grad(each, logits)
                back = back.to(matrix.dtype)
                gradient[step, rows] = (back @ said).to(states.dtype)
                if of_own is not None:
                    of_own[step] += back.T @ states[step, rows].to(matrix.dtype)
                total += each.detach().double()
        ctx.save_for_backward(gradient, of_own)
        return total.to(states.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        gradient, of_own = ctx.saved_tensors
        own = None if of_own is None else of_own * grad
        return gradient * grad, None, None, own, None, None, None, None


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
    own: Tensor | None = None,
) -> Tensor:
    """Σ over steps and rows of ``weights`` [J, N] times the loss ``name`` (:mod:`.losses`).

    ``states``: J of [N, H], as the vocabulary matrix takes them; ``targets`` [N, H]: the target's own, the
    same at every step, as a row has one law; ``matrix`` [V', H]: rows of the drafted tokens; ``wanted`` [N]:
    places among them of the tokens that came, of weight 0 where there is none; ``own`` [J, V', H]: rows of
    the drafter's own at each step, which learn too (None: the target's, which stay).
    """
    out: Tensor = _Summed.apply(torch.stack(list(states)), targets, matrix, own, wanted, weights, name, share)  # type: ignore[no-untyped-call]
    return out
