"""The first half of a gated MLP in one step: ``activation(x @ gate.T) * (x @ up.T)`` in 16 bits.

The rule of both kernels here, so that they may stand for one another (pinned and fast class): activations
are bfloat16, sums are float32, the activated gate is rounded to bfloat16, and so is its product with the
unrounded sum of the up rows. The fused form saves four passes over the widest tensor of the model, which
in a long prefill cost as much as half the products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.models.gated import pinned_gated
from workbench.models.packed import TILE, LinearFn, PackedLinear, fbgemm_float16, tiled

ONEDNN = {"silu": ("swish", ""), "gelu": ("gelu", "none"), "gelu_pytorch_tanh": ("gelu", "tanh")}
"""Post-operation and algorithm of oneDNN for each activation."""


def onednn_gated(weight: Tensor, bias: Tensor | None, activation: str, *, pinned: bool) -> PackedLinear:
    """oneDNN with the activation and the product as epilogues; ``weight`` [2F, H] and ``bias`` bfloat16."""
    post, algorithm = ONEDNN[activation]
    reorder = torch.ops.mkldnn._reorder_linear_weight
    gate, up = (reorder(half.contiguous(), None) for half in weight.chunk(2))
    gate_bias, up_bias = (None, None) if bias is None else (half.contiguous() for half in bias.chunk(2))
    unary, binary = torch.ops.mkldnn._linear_pointwise.default, torch.ops.mkldnn._linear_pointwise.binary
    low = torch.bfloat16

    def fn(x: Tensor) -> Tensor:
        x = x.to(low)
        out: Tensor = binary(x, unary(x, gate, gate_bias, post, [], algorithm), up, up_bias, "mul")
        return out

    held = tuple(t for t in (gate, up, gate_bias, up_bias) if t is not None)
    kernel = f"oneDNN bf16, {activation} fused"
    run: LinearFn = fn
    if pinned:
        run, kernel = tiled(fn), f"{kernel}, {TILE}-row tiles"
    n, k = weight.shape
    return PackedLinear(run, n, k, kernel, held, gated=True)


def fbgemm_gated(weight: Tensor, bias: Tensor | None, activation: str) -> PackedLinear:
    """FBGEMM's fused rows, then the same roundings row by row: for the pinned class.

    ``weight`` [2F, H] must be exact in float16, as for :func:`fbgemm_float16`.
    """
    linear = fbgemm_float16(weight, bias, rounded=False)
    gated = pinned_gated(activation, torch.bfloat16)
    name = f"{linear.kernel}, {activation}"
    return PackedLinear(
        lambda x: gated(linear.fn(x)),
        linear.n,
        linear.k,
        name,
        linear.held,
        linear.opaque_nbytes,
        gated=True,
    )
