"""Expert weights: one tensor per projection, [E, N, K], gate and up rows taking turns.

Row ``2 i`` of the first projection is row ``i`` of gate, row ``2 i + 1`` row ``i`` of up. A thread's
accumulator holds neighbouring columns of a tile, so gate and up of one unit meet in one thread, and
SiLU(gate) * up needs neither shared memory nor a second kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.spec.errors import WrongShape


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """[E, 2 I, H] from ``gate`` and ``up`` [E, I, H]; :class:`WrongShape` unless both are alike."""
    if gate.shape != up.shape or gate.ndim != 3:
        raise WrongShape(f"Gate {tuple(gate.shape)} and up {tuple(up.shape)} must be alike, [E, I, H].")
    return torch.stack([gate, up], 2).flatten(1, 2).contiguous()


def split_gate_up(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up [E, I, H] of an interleaved [E, 2 I, H]; :class:`WrongShape` for an odd number of rows."""
    if gate_up.ndim != 3 or gate_up.shape[1] % 2:
        raise WrongShape(f"Gate and up rows of {tuple(gate_up.shape)} do not pair up.")
    return gate_up[:, 0::2].contiguous(), gate_up[:, 1::2].contiguous()
