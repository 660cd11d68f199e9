"""The small model and its modules: shape, joint forward pass, and the losses of both kinds of training.

*Joint* (DeepSeek-V3): main loss + λ/D Σ cross-entropy of the D modules, which form a chain: module k is fed
with the states of module k - 1. *Recursive* (FastMTP, arXiv 2509.18362): the main model is frozen, one module
is fed with its own states K times, weighted β; its teacher is the token that came, or the main model's law.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.training.heads.losses import LossName, loss_of
from workbench.training.mtp.module import MTPLayer
from workbench.training.tiny.tokenizer import END_OF_TEXT

VOCAB_SIZE = 4096
BETAS = (0.51, 0.31, 0.18)
"""FastMTP's weights of its three passes: powers of 0.6, normed."""


def llama_config() -> LlamaConfig:
    """4 layers of 256, 4 query and 2 key/value heads of 64, gated MLP of 640, tied embedding."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=640,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TEXT,
        pad_token_id=END_OF_TEXT,
    )


@dataclass(frozen=True)
class Passes:
    """Of rows [B, T]: main logits [B, T, V], and those of each module or pass of one."""

    main: Tensor
    drafts: list[Tensor]


class MTPModel(nn.Module):
    """A Llama and its modules; without modules, its twin."""

    def __init__(self, config: LlamaConfig, modules: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)  # the main model first: its twin starts from the same weights
        self.main = LlamaForCausalLM(config)
        self.mtp = nn.ModuleList(MTPLayer(config) for _ in range(modules))

    def chain(self, rows: Tensor) -> Passes:
        """Every module once, each fed with the states of the one before."""
        embeds, state, rotation = self._main(rows)
        main, drafts = self.head(state), []
        for layer in self._layers:
            (state,) = layer.unroll(embeds, state, rotation)
            drafts.append(self.head(layer.normed(state)))
        return Passes(main, drafts)

    def recursion(self, rows: Tensor, depth: int) -> Passes:
        """The first module ``depth`` times, fed with its own states; the main model is not trained."""
        with torch.no_grad():
            embeds, state, rotation = self._main(rows)
            main = self.head(state)
        layer, frozen = self._layers[0], self.main.lm_head.weight.detach()
        streams = layer.unroll(embeds, state, rotation, depth)
        return Passes(main, [F.linear(layer.normed(stream), frozen) for stream in streams])

    def head(self, states: Tensor) -> Tensor:
        """The main model's head."""
        logits: Tensor = self.main.lm_head(states)
        return logits

    @property
    def _layers(self) -> list[MTPLayer]:
        return [layer for layer in self.mtp if isinstance(layer, MTPLayer)]

    def _main(self, rows: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        # In a CPU training step the flash kernel pays off beyond 512 tokens only.
        self.main.set_attn_implementation("eager" if rows.shape[1] <= 512 else "sdpa")
        embeds = self.main.model.embed_tokens(rows)
        state = self.main.model(input_ids=rows, use_cache=False).last_hidden_state
        positions = torch.arange(rows.shape[1], device=rows.device)[None]
        return embeds, state, self.main.model.rotary_emb(embeds, positions)


def next_token_loss(logits: Tensor, rows: Tensor, first: int = 0) -> Tensor:
    """Mean cross-entropy in nats of logits [B, T, V] against the tokens behind; rows from ``first`` on."""
    return F.cross_entropy(logits[:, first:-1].flatten(0, 1).float(), rows[:, first + 1 :].flatten())


def joint_loss(passes: Passes, rows: Tensor, weight: float) -> Tensor:
    """Main loss + ``weight``/D times the sum of the modules' (DeepSeek-V3, eq. 25)."""
    loss = next_token_loss(passes.main, rows)
    extra = [next_token_loss(logits, rows, k) for k, logits in enumerate(passes.drafts)]
    return loss + weight / len(extra) * sum(extra[1:], extra[0]) if extra else loss


def recursive_loss(
    passes: Passes, rows: Tensor, betas: Sequence[float], name: LossName, share: float
) -> Tensor:
    """Σ β_d times the loss of pass d, against the tokens that came or the main model's law."""
    total = torch.zeros((), device=rows.device)
    for d, (beta, logits) in enumerate(zip(betas, passes.drafts, strict=True)):
        ids = rows[:, d + 1 :].flatten()
        law = None if name == "ce" else passes.main[:, d:-1].flatten(0, 1).float().softmax(-1)
        found = loss_of(name, logits[:, d:-1].flatten(0, 1).float(), ids, law, share)
        total = total + beta * found.mean()
    return total
