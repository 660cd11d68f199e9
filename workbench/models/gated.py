"""The gated activations of the MLP (GLU variants, arXiv 2002.05202) on the fused gate and up rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.rowwise import SERIAL, pinned_rows

Gated = Callable[[Tensor], Tensor]


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's product: ``silu(gate) * up`` of the fused [T, 2F], giving [T, F]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """GeGLU with the exact error function."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """GeGLU with the tanh approximation (Gemma)."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


GATED = {"silu": silu_mul, "gelu": gelu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}

_GELU_SERIAL = 6_143  # GELU's own loop is split from 6144 elements on


def pinned_gated(activation: str) -> Gated:
    """The same activation with bits that do not depend on the number of rows."""
    gated = GATED[activation]
    if activation == "silu":
        return lambda gate_up: pinned_rows(gated, gate_up, SERIAL)
    serial = 2 * _GELU_SERIAL  # rows hold gate and up, GELU sees one

    def tile(gate_up: Tensor) -> Tensor:
        if gate_up.shape[0] > 1 or gate_up.numel() > serial // 2:
            return gated(gate_up)
        # A lone row is contiguous and would go to oneDNN's GELU, several strided ones to ATen's.
        return gated(torch.cat((gate_up, gate_up)))[:1]

    return lambda gate_up: pinned_rows(tile, gate_up, serial)
