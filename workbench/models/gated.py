"""The gated activations of the MLP (GLU variants, arXiv 2002.05202) on the fused gate and up rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from workbench.models.rowwise import SERIAL, pinned_rows

Gated = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,  # SwiGLU
    "gelu": F.gelu,  # GeGLU with the exact error function
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),  # Gemma
}

_GELU_SERIAL = 6_143  # GELU's own loop is split from 6144 elements on


def fast_gated(activation: str) -> Gated:
    """``activation(gate) * up`` of the fused [T, 2F], giving [T, F]."""
    function = ACTIVATIONS[activation]

    def product(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return function(gate).mul_(up)

    return product


def pinned_gated(activation: str, rounded: torch.dtype | None = None) -> Gated:
    """The same with bits that do not depend on the number of rows.

    ``rounded``: the activated gate and the product are each rounded to this dtype.
    """
    function = ACTIVATIONS[activation]

    def product(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        if rounded is None:
            return function(gate).mul_(up)
        return function(gate).to(rounded).to(up.dtype).mul_(up).to(rounded)

    if activation == "silu":
        return lambda gate_up: pinned_rows(product, gate_up, SERIAL)
    serial = 2 * _GELU_SERIAL  # rows hold gate and up, GELU sees one

    def tile(gate_up: Tensor) -> Tensor:
        if gate_up.shape[0] > 1 or gate_up.numel() > serial // 2:
            return product(gate_up)
        # A lone row is contiguous and would go to oneDNN's GELU, several strided ones to ATen's.
        return product(torch.cat((gate_up, gate_up)))[:1]

    return lambda gate_up: pinned_rows(tile, gate_up, serial)
