"""A Llama whose layers may be left out for some rows, and which may be read behind each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.training.mtp.model import VOCAB_SIZE, next_token_loss
from workbench.training.tiny.tokenizer import END_OF_TEXT


def llama_config() -> LlamaConfig:
    """6 layers of 256, 4 query and 2 key/value heads of 64, gated MLP of 512, tied embedding: a third of the
    layers are two."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
    )


class ExitModel(nn.Module):
    """``main`` is an ordinary Llama: what is trained is how it is read."""

    def __init__(self, config: LlamaConfig, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.main = LlamaForCausalLM(config)
        self.main.set_attn_implementation("sdpa")  # causal without a mask

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return len(self.main.model.layers)

    def streams(self, rows: Tensor, left_out: Tensor | None = None) -> list[Tensor]:
        """What leaves each layer [B, T, H], of int64 ``rows`` [B, T].

        ``left_out`` bool [L, B]: layers that a row passes by, x_{l+1} = x_l; nothing is rescaled for it.
        """
        hidden = self.main.model.embed_tokens(rows)
        positions = torch.arange(rows.shape[1], device=rows.device)[None]
        rotation = self.main.model.rotary_emb(hidden, positions)
        out = []
        for index, layer in enumerate(self.main.model.layers):
            kept = None if left_out is None else ~left_out[index]
            if kept is None or bool(kept.all()):
                hidden = layer(hidden, attention_mask=None, position_embeddings=rotation)
            elif bool(kept.any()):
                run = layer(hidden[kept], attention_mask=None, position_embeddings=rotation)
                hidden = hidden.index_put((kept.nonzero()[:, 0],), run.to(hidden.dtype))
            out.append(hidden)
        return out

    def logits(self, stream: Tensor) -> Tensor:
        """What the model's own final norm and head say of a stream [..., H]."""
        found: Tensor = self.main.lm_head(self.main.model.norm(stream))
        return found


def dropped(rates: Sequence[float], rows: int, step: int, seed: int) -> Tensor:
    """bool [L, B]: which layers each row passes by; the same for the same step and seed."""
    gen = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return torch.rand(len(rates), rows, generator=gen) < torch.tensor(rates)[:, None]


def exit_loss(model: ExitModel, rows: Tensor, left_out: Tensor | None, weights: Sequence[float]) -> Tensor:
    """Σ_l ẽ(t, l) times the cross-entropy behind layer l; layers that weigh nothing are not read."""
    total = torch.zeros((), device=rows.device)
    for stream, weight in zip(model.streams(rows, left_out), weights, strict=True):
        if weight:
            total = total + weight * next_token_loss(model.logits(stream), rows)
    return total


def by_layer(model: ExitModel, windows: Tensor) -> list[dict[str, float]]:
    """Behind each layer, over int64 [N, T]: ``loss`` in nats, ``right``: how often its likeliest token came,
    ``same``: how often it is the last layer's, ``r2``: Σ min(p, q) with the last layer's law."""
    names = ("loss", "right", "same", "r2")
    sums = [dict.fromkeys(names, 0.0) for _ in range(model.layers)]
    batches = torch.split(windows, 2)
    with torch.inference_mode():
        for rows in batches:
            streams = model.streams(rows)
            p = model.logits(streams[-1])[:, :-1].float().softmax(-1)
            for found, stream in zip(sums, streams, strict=True):
                logits = model.logits(stream)[:, :-1].float()
                best = logits.argmax(-1)
                found["loss"] += float(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))
                found["right"] += float((best == rows[:, 1:]).float().mean())
                found["same"] += float((best == p.argmax(-1)).float().mean())
                found["r2"] += float(torch.minimum(p, logits.softmax(-1)).sum(-1).mean())
    return [{name: found[name] / len(batches) for name in names} for found in sums]
