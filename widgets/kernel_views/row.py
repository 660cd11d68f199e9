"""One row of attention out of a real model: its query, the keys and values it sees, and their tokens.

The model reads a text of the data folder in float32; the row is that of the last token. Layer and head can
be named; by default it is the head in which the online softmax has most to rescale.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from workbench.kernels.attention.tile_walk import walk
from workbench.models.config import ModelConfig
from workbench.models.datadir import data_dir
from workbench.models.decoder import Decoder
from workbench.models.plain import plain_pack
from workbench.models.registry import open_source
from workbench.models.tokenizer import load_tokenizer
from workbench.models.weightset import build_weight_set
from workbench.spec.errors import OptionError

Kept = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """``q`` [D] (scale 1/sqrt(D) included), ``k``, ``v`` [n, D] float32, ``tokens``: the text of each key."""

    model: str
    layer: int
    head: int
    q: Tensor
    k: Tensor
    v: Tensor
    tokens: tuple[str, ...]

    @property
    def where(self) -> str:
        """Model, layer and head in words."""
        return f"{self.model}, layer {self.layer}, head {self.head}"


def attention_row(
    model: str = "tiny",
    *,
    keys: int = 256,
    tile: int = 32,
    layer: int | None = None,
    head: int | None = None,
    skip: int = 0,
) -> Row:
    """The row of the last of ``keys`` tokens of the evaluation text, from its token ``skip`` on.

    Raises ``OptionError`` for a layer or head the model does not have, for fewer than two tokens, or more
    than model or text hold, and the model's own errors when it cannot be opened.
    """
    source = open_source(model)
    config, tokenizer = source.config, load_tokenizer(model)
    text = (data_dir() / "text" / "eval.txt").read_text(encoding="utf-8")[: 16 * (keys + skip)]
    ids = tokenizer.encode(text)[skip : skip + keys]
    if not 2 <= keys <= config.max_position or len(ids) < keys:
        raise OptionError(
            f"A row of {keys} keys.", hint=f"{model} reads 2 to {config.max_position} tokens at a time."
        )
    for name, value, count in (("layer", layer, config.num_layers), ("head", head, config.num_heads)):
        if value is not None and not 0 <= value < count:
            raise OptionError(f"{name} = {value}.", hint=f"{model} has {count}, from 0 on.")
    if config.attn_softcap is not None:
        raise OptionError(f"{model} caps its scores; the walk does not.", hint="Choose another model.")
    weights = build_weight_set(source, plain_pack(torch.float32), dtype=torch.float32)
    rows = _rows(Decoder(config, weights), ids, (layer,) if layer is not None else range(config.num_layers))
    heads = (head,) if head is not None else range(config.num_heads)
    group = config.num_heads // config.num_kv_heads
    found = [(i, h, q[h], k[:, h // group], v[:, h // group]) for i, (q, k, v) in rows.items() for h in heads]
    best = max(found, key=lambda r: _rescaling(r[2], r[3], r[4], tile))
    seen = ids[-len(best[3]) :]
    return Row(model, *best, tokens=tuple(tokenizer.decode([i], skip_special=False) for i in seen))


def _rescaling(q: Tensor, k: Tensor, v: Tensor, tile: int) -> float:
    """How much earlier sums shrink over the tiles: the sum of 1 - a behind the first tile."""
    return sum(1 - step.rescaled for step in walk(q, k, v, tile)[1:])


def _rows(decoder: Decoder, ids: list[int], layers: Iterable[int]) -> dict[int, Kept]:
    """Last query [Hq, D] with visible keys and values [n, Hkv, D], by layer."""
    config: ModelConfig = decoder.config
    kept: dict[int, Kept] = {}
    position = torch.arange(len(ids))

    def attend_and_keep(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        window = config.window(layer) or len(ids)
        kept[layer] = (q[-1].clone(), k[-window:].clone(), v[-window:].clone())
        behind = position[:, None] - position[None, :]
        mask = (behind >= 0) & (behind < window)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    with torch.inference_mode():
        decoder.forward(torch.tensor(ids), position, attend_and_keep)
    return {i: kept[i] for i in layers}
