"""Training FastEagle heads: a cascade of layers, each for a token one further ahead, in one pass.

Huang et al., *FastEagle* (arXiv 2509.20416). Row s reads the embedding of x_s and the streams at position
s - 1; behind layer i (from 1) it answers for the token i places on, the target's law at position s + i - 1.
Every layer is supervised, so the loss of layer i trains the layers up to i. The paper's weights between the
layers' losses are not published; here layer i counts 0.8^(i-1), as the steps of EAGLE-3 do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.models.config import ModelConfig
from workbench.models.gated import ACTIVATIONS
from workbench.models.rope import apply_rope
from workbench.models.source import Source
from workbench.models.weightset import WeightSet
from workbench.training.heads.eagle import EagleLoss, EagleShape
from workbench.training.heads.initial import stream_size
from workbench.training.heads.rows import Shown
from workbench.training.heads.unroll import Batch, before

_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_GAINS = ("input_layernorm", "post_attention_layernorm")
SMALL = 0.02


def cascade_shapes(config: ModelConfig, layers: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a head of ``layers`` by their names in its file, without the drafted vocabulary."""
    h, inner = config.hidden_size, config.intermediate_size
    q, kv = (config.q_size, h), (config.kv_size, h)
    sizes = dict(zip(_PARTS, (q, kv, kv, (h, config.q_size)), strict=True))
    sizes |= dict(zip(_MLP, ((inner, h), (inner, h), (h, inner)), strict=True))
    out: dict[str, tuple[int, ...]] = {"fuse.weight": (h, 4 * h), "fuse.norms": (4, h), "norms": (layers, h)}
    for i in range(layers):
        out |= {f"layers.{i}.{name}.weight": shape for name, shape in sizes.items()}
        out |= {f"layers.{i}.{name}.weight": (h,) for name in _GAINS}
    return out


def begin_cascade(
    config: ModelConfig, layers: int, source: Source, weights: WeightSet, shown: Sequence[Shown], seed: int
) -> dict[str, Tensor]:
    """What a cascade starts from, float32: the target's last layers, the last stream passed on."""
    generator = torch.Generator().manual_seed(seed)
    h, first = config.hidden_size, config.num_layers - layers
    out = {}
    for name, shape in cascade_shapes(config, layers).items():
        out[name] = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * SMALL
    for i in range(layers):
        own = weights.layers[max(first + i, 0)]
        base = f"model.layers.{max(first + i, 0)}"
        for name in (*_PARTS, *_MLP):
            out[f"layers.{i}.{name}.weight"] = source.tensor(f"{base}.{name}.weight").float()
        out[f"layers.{i}.input_layernorm.weight"] = own.attn_gain.float()
        out[f"layers.{i}.post_attention_layernorm.weight"] = own.mlp_gain.float()
    out["norms"] = weights.final_gain.float().expand(layers, h).clone()
    sizes = [stream_size(shown, i) for i in range(3)]
    out["fuse.norms"][:3] *= sizes[2]
    out["fuse.norms"][3] *= stream_size(shown, 0)
    out["fuse.weight"] *= 0.1
    out["fuse.weight"][:, 2 * h : 3 * h] = torch.eye(h)
    return out


class Cascade(nn.Module):
    """The layers as parameters. ``precision``: what matrices are multiplied in (None: as they are kept)."""

    def __init__(
        self, config: ModelConfig, layers: int, tensors: Mapping[str, Tensor], precision: torch.dtype | None
    ) -> None:
        super().__init__()
        self.config, self.layers, self.precision = config, layers, precision
        self.form = SimpleNamespace(kind="fasteagle")
        self._names = {name: name.replace(".", "_") for name in cascade_shapes(config, layers)}
        for name, plain in self._names.items():
            self.register_parameter(plain, nn.Parameter(tensors[name].clone()))
        self._act = ACTIVATIONS[config.activation]

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their names in a head file."""
        return {name: getattr(self, plain).detach() for name, plain in self._names.items()}

    def outlet(self, given: Tensor) -> Tensor:
        """What the vocabulary matrix is given: each layer's norm is already in it."""
        return given

    def run(
        self, embedded: Tensor, streams: Sequence[Tensor], batch: Batch, rotation: tuple[Tensor, Tensor]
    ) -> list[Tensor]:
        """Normed outputs [N, H] of every layer at the answers' rows; inputs [C, H] of all rows."""
        gains = self._get("fuse.norms")
        normed = [self._norm(x, g) for x, g in zip((*streams[:3], embedded), gains, strict=True)]
        hidden = self._linear(torch.cat(normed, -1), "fuse.weight")
        out = []
        for i, gain in enumerate(self._get("norms")):
            hidden = self._layer(i, hidden, batch, rotation)
            out.append(self._norm(hidden[batch.answers], gain))
        return out

    def _layer(self, index: int, hidden: Tensor, batch: Batch, rotation: tuple[Tensor, Tensor]) -> Tensor:
        c, base = self.config, f"layers.{index}"
        x = self._norm(hidden, self._get(f"{base}.input_layernorm.weight"))
        q, k, v = (
            self._linear(x, f"{base}.self_attn.{n}_proj.weight").unflatten(-1, (-1, c.head_dim))
            for n in "qkv"
        )
        q, k = (apply_rope(t, *rotation) for t in (q, k))
        laid = [self._laid(t, batch) for t in (q * c.query_scale, k, v)]
        mixed = F.scaled_dot_product_attention(*laid, is_causal=True, scale=1.0, enable_gqa=True)
        flat = mixed.transpose(1, 2).flatten(0, 1)[batch.conversation * batch.longest + batch.positions]
        hidden = hidden + self._linear(flat.flatten(1), f"{base}.self_attn.o_proj.weight")
        x = self._norm(hidden, self._get(f"{base}.post_attention_layernorm.weight"))
        gate = self._act(self._linear(x, f"{base}.mlp.gate_proj.weight"))
        inner = gate * self._linear(x, f"{base}.mlp.up_proj.weight")
        return hidden + self._linear(inner, f"{base}.mlp.down_proj.weight")

    def _laid(self, rows: Tensor, batch: Batch) -> Tensor:
        """[C, heads, D] as [B, heads, L, D]; rows behind a conversation's end are seen by none of it."""
        count = len(batch.shown)
        laid = rows.new_zeros(count * batch.longest, *rows.shape[1:])
        laid = laid.index_copy(0, batch.conversation * batch.longest + batch.positions, rows)
        return laid.view(count, batch.longest, *rows.shape[1:]).transpose(1, 2)

    def _get(self, name: str) -> Tensor:
        found: Tensor = getattr(self, self._names[name])
        return found

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return F.rms_norm(x, gain.shape, gain, self.config.norm_eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight = self._get(name)
        if self.precision is None:
            return F.linear(x, weight)
        return F.linear(x.to(self.precision), weight.to(self.precision)).to(x.dtype)


class CascadeLoss(EagleLoss):
    """Layer i's answers laid at the position they are for: the same sums as of EAGLE-3's steps."""

    model: Cascade  # type: ignore[assignment]

    def __init__(self, model: Cascade, shape: EagleShape, *rest: object) -> None:
        super().__init__(model, shape, *rest)  # type: ignore[arg-type]
        self.steps = model.layers

    def run(
        self, batch: Batch, steps: int, noise: torch.Generator | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """What layer j + 1 gives for the position of each answer's row, and what the target gives there."""
        dtype = self.decoder.weights.residual_dtype
        with torch.no_grad():
            embedded = self.decoder.embed(batch.ids)
            target = self.decoder.final_norm(batch.last(dtype))
            streams = batch.streams(dtype)
            cos, sin = self.table.gather(batch.positions, int(batch.positions.max()))
        given = self.model.run(embedded, streams, batch, (cos[:, None], sin[:, None]))
        return [before(rows, j) for j, rows in enumerate(given)][:steps], target
