"""Heads that draft by a decoder layer of their own, as parameters to train: EAGLE-1 and EAGLE-3.

Row s belongs to token x_s. It reads the embedding of x_s and what is known of position s - 1, and what it
gives stands for position s: the target's law of x_{s+1}. What is known is the target's own state where it has
one, and what the row before gave where it has none yet.

- *eagle3* (arXiv 2503.01840): the state is FC of three of the target's streams, each normed first (without a
  norm the first token's huge values rule the sum). Queries, keys and values read both halves normed, the
  residual stream is the state alone, and what it gives is fed back before its last norm.
- *eagle* (arXiv 2401.15077): the state is what enters the target's vocabulary matrix; FC of both halves goes
  into a layer without an input norm, whose output is meant to be the next such state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.models.config import ModelConfig
from workbench.models.gated import ACTIVATIONS

Kind = Literal["eagle", "eagle3"]
LAYER = "layers.0"


def layers_read(kind: str, layers: int) -> tuple[int, ...]:
    """Layers of a model of ``layers`` whose input the state is made of; ``layers``: what leaves the last.

    For *eagle3* and *fasteagle* an early, a middle and a late one, as released heads have them.
    """
    if kind == "eagle":
        return (layers,)
    return tuple(min(max(i, 0), layers - 1) for i in (2, layers // 2, layers - 3))


@dataclass(frozen=True)
class Form:
    """A head's kind and sizes: those of the target's layers."""

    kind: Kind
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float
    activation: str

    @classmethod
    def of(cls, kind: Kind, config: ModelConfig) -> Form:
        """The form for a model."""
        return cls(
            kind,
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.norm_eps,
            config.query_scale,
            config.activation,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors of a head by their names in its file, without the drafted vocabulary."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        third = self.kind == "eagle3"
        read = 2 * h if third else h
        attention, mlp = f"{LAYER}.self_attn", f"{LAYER}.mlp"
        found: dict[str, tuple[int, ...]] = {
            "fuse.weight": (h, 3 * h if third else 2 * h),
            f"{attention}.q_proj.weight": (q, read),
            f"{attention}.k_proj.weight": (kv, read),
            f"{attention}.v_proj.weight": (kv, read),
            f"{attention}.o_proj.weight": (h, q),
            f"{mlp}.gate_proj.weight": (self.inner, h),
            f"{mlp}.up_proj.weight": (self.inner, h),
            f"{mlp}.down_proj.weight": (h, self.inner),
            f"{LAYER}.post_attention_layernorm.weight": (h,),
        }
        if third:
            gains = (f"{LAYER}.embed_norm.weight", f"{LAYER}.state_norm.weight", "norm.weight")
            return {**found, "fuse.norms": (3, h), **dict.fromkeys(gains, (h,))}
        return {**found, "fuse.bias": (h,)}


class Drafter(nn.Module):
    """A head's parameters and the pieces of its layer; attention is the caller's.

    ``precision``: what matrices are multiplied in (None: what they are kept in).
    """

    def __init__(
        self, form: Form, tensors: Mapping[str, Tensor], precision: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.form, self.precision = form, precision
        self._names = {name: name.replace(".", "_") for name in form.shapes()}
        for name, plain in self._names.items():
            self.register_parameter(plain, nn.Parameter(tensors[name].clone()))
        self._act = ACTIVATIONS[form.activation]

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their names in a head file."""
        return {name: getattr(self, plain).detach() for name, plain in self._names.items()}

    def fuse(self, streams: Sequence[Tensor]) -> Tensor:
        """States [n, H] of the target's streams [n, H]: for *eagle* the one there is, as it comes."""
        if self.form.kind == "eagle":
            (stream,) = streams
            return stream
        gains = self._get("fuse.norms")
        normed = [self._norm(s, g) for s, g in zip(streams, gains, strict=True)]
        return self._linear(torch.cat(normed, -1), "fuse.weight")

    def enter(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What queries, keys and values read, and the residual stream, of rows [n, H]."""
        if self.form.kind == "eagle":
            both = torch.cat((embedded, state), -1)
            residual = self._linear(both, "fuse.weight") + self._get("fuse.bias")
            return residual, residual
        halves = (
            self._norm(embedded, self._get(f"{LAYER}.embed_norm.weight")),
            self._norm(state, self._get(f"{LAYER}.state_norm.weight")),
        )
        return torch.cat(halves, -1), state

    def heads(self, read: Tensor, part: Literal["q", "k", "v"]) -> Tensor:
        """Queries, keys or values [n, heads, D], neither turned nor scaled."""
        return self._linear(read, f"{LAYER}.self_attn.{part}_proj.weight").unflatten(
            -1, (-1, self.form.head_dim)
        )

    def leave(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output [n, H] of what attention gave [n, Hq * D]."""
        residual = residual + self._linear(attended, f"{LAYER}.self_attn.o_proj.weight")
        x = self._norm(residual, self._get(f"{LAYER}.post_attention_layernorm.weight"))
        gate = self._act(self._linear(x, f"{LAYER}.mlp.gate_proj.weight"))
        inner = gate * self._linear(x, f"{LAYER}.mlp.up_proj.weight")
        return residual + self._linear(inner, f"{LAYER}.mlp.down_proj.weight")

    def outlet(self, given: Tensor) -> Tensor:
        """What the vocabulary matrix is given."""
        return given if self.form.kind == "eagle" else self._norm(given, self._get("norm.weight"))

    def _get(self, name: str) -> Tensor:
        found: Tensor = getattr(self, self._names[name])
        return found

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, self.form.eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = self._get(name)
        if self.precision is None:
            return F.linear(x, weight)
        return F.linear(x.to(self.precision), weight.to(self.precision)).to(x.dtype)
