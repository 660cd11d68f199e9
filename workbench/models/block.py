"""A decoder layer as two closures around attention: what goes in, and what comes out of it.

The torch form is bound from the layer's packed linears; :mod:`workbench.models.compiled` has another form of
the same two steps. A decoder is a flat list of blocks and never asks which form it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.models.config import ModelConfig
from workbench.models.gated import Gated
from workbench.models.norms import Norm
from workbench.models.rope import apply_rope
from workbench.models.weightset import LayerWeights

Rotation = tuple[Tensor, Tensor]
"""Cosines and signed sines of a step's rows: what the decoder's blocks take (see ``Decoder``)."""
Enter = Callable[[Tensor, Rotation], tuple[Tensor, Tensor, Tensor]]
"""``hidden`` [T, H] -> scaled, rotated q [T, Hq, D], rotated k and v [T, Hkv, D], in the residual dtype."""
Leave = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Attention's output [T, Hq * D], ``hidden`` [T, H], the rows that go on (or None) -> the stream behind."""


@dataclass(frozen=True, slots=True)
class Block:
    """The two steps of one layer; neither changes its inputs."""

    enter: Enter
    leave: Leave


def torch_block(
    layer: LayerWeights, config: ModelConfig, norm: Callable[[Tensor, float], Norm], gated: Gated
) -> Block:
    """A layer in plain torch; rotations are [T, Hq + Hkv, D] (or broadcastable), the query scale included."""
    heads, kv_heads, dim, eps = config.num_heads, config.num_kv_heads, config.head_dim, config.norm_eps
    rotated, width = heads + kv_heads, heads + 2 * kv_heads

    def optional(gain: Tensor | None) -> Norm | None:
        return None if gain is None else norm(gain, eps)

    attn_norm, mlp_norm = norm(layer.attn_gain, eps), norm(layer.mlp_gain, eps)
    qk_norm = optional(layer.qk_gain)
    attn_out_norm, mlp_out_norm = optional(layer.attn_out_gain), optional(layer.mlp_out_gain)
    qkv_fn, o_fn, gate_up, down_fn = layer.qkv.fn, layer.o.fn, layer.gate_up.fn, layer.down.fn
    gated_up = gate_up if layer.gate_up.gated else lambda x: gated(gate_up(x))

    def enter(hidden: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv_fn(attn_norm(hidden)).to(hidden.dtype).view(-1, width, dim)
        qk, v = qkv[:, :rotated], qkv[:, rotated:]
        if qk_norm is not None:
            qk = qk_norm(qk)
        qk = apply_rope(qk, *rotation)
        return qk[:, :heads], qk[:, heads:], v

    def leave(out: Tensor, hidden: Tensor, keep: Tensor | None) -> Tensor:
        if keep is not None:
            out, hidden = out.index_select(0, keep), hidden.index_select(0, keep)
        out = o_fn(out)
        if attn_out_norm is not None:
            out = attn_out_norm(out.to(hidden.dtype))
        hidden = hidden + out  # bfloat16 sums are added as they are
        out = down_fn(gated_up(mlp_norm(hidden)))
        if mlp_out_norm is not None:
            out = mlp_out_norm(out.to(hidden.dtype))
        return hidden + out

    return Block(enter, leave)
