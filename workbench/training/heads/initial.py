"""What a drafter starts from: the target's last layer, whose work is nearest to its own.

A drafter that starts there says from the first step on what a model without its last layer would, from a
state that is one position old; it has to learn what the newest token adds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workbench.models.source import Source
from workbench.models.weightset import WeightSet
from workbench.spec.errors import MissingTensor
from workbench.training.heads.drafter import LAYER, Form
from workbench.training.heads.rows import Shown

SMALL = 0.02
LOOKED = 64
"""Conversations that the size of a stream is taken from."""


def initial(
    form: Form, source: Source, weights: WeightSet, shown: Sequence[Shown], seed: int
) -> dict[str, Tensor]:
    """Tensors of a head by their names in its file, float32.

    Matrices that the target's last layer has in another shape start small and random.
    """
    generator = torch.Generator().manual_seed(seed)
    last = weights.layers[-1]
    gain = weights.final_gain.float()
    sizes = [stream_size(shown, i) for i in range(len(shown[0].streams))]
    out = {}
    for name, shape in form.shapes().items():
        value = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * SMALL
        found = _of_last_layer(source, name)
        if found is not None and found.shape[0] == shape[0] and found.shape[1] <= shape[1]:
            value[:, -found.shape[1] :] = found  # of the two halves that are read, the state is the second
        out[name] = value
    eye = torch.eye(form.hidden)
    mlp_gain = last.mlp_gain.float()
    out[f"{LAYER}.post_attention_layernorm.weight"] = mlp_gain
    out["fuse.weight"][:, -form.hidden :] = eye
    if form.kind == "eagle3":
        # The last of the three streams as it is, but for what differs from row to row in size alone.
        out["fuse.norms"] = torch.ones(3, form.hidden) * sizes[2]
        out["fuse.weight"][:, : -form.hidden] *= 0.1
        out[f"{LAYER}.state_norm.weight"] = last.attn_gain.float()
        out["norm.weight"] = gain
        return out
    out["fuse.bias"] = torch.zeros(form.hidden)
    # What is read is normed already, with the gain of the last norm: the layer's own takes its place, and
    # what the layer adds shrinks as the stream did.
    into, outof = last.attn_gain.float() / _away(gain), gain / sizes[-1]
    for part in "qkv":
        out[f"{LAYER}.self_attn.{part}_proj.weight"] *= into
    for name in (f"{LAYER}.self_attn.o_proj.weight", f"{LAYER}.mlp.down_proj.weight"):
        out[name] *= outof[:, None]
    out[f"{LAYER}.post_attention_layernorm.weight"] = mlp_gain
    return out


def _of_last_layer(source: Source, name: str) -> Tensor | None:
    if not name.startswith(LAYER):
        return None
    number = source.config.num_layers - 1
    try:
        found = source.tensor(f"model.layers.{number}.{name.removeprefix(f'{LAYER}.')}").float()
    except MissingTensor:
        return None
    return found if found.ndim == 2 else None


def stream_size(shown: Sequence[Shown], index: int) -> float:
    """Root mean square of a stream's rows, the median over them: a few rows are huge."""
    rows = [s.streams[index].float().square().mean(-1).sqrt() for s in shown[:LOOKED]]
    return float(torch.cat(rows).median())


def _away(gain: Tensor) -> Tensor:
    """A gain to divide by."""
    return torch.where(gain.abs() < 1e-3, 1e-3, gain)
