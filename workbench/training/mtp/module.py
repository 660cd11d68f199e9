"""A module of multi-token prediction for training: a decoder layer behind two norms and a projection.

DeepSeek-V3 (arXiv 2412.19437, section 2.2), with the parts named and ordered as in its checkpoints and
GLM's: ``eh_proj`` takes [enorm(embedding), hnorm(state)], the embedding first; the head is the main model's,
behind a norm of the module's own. Row s belongs to token x_s: it is given emb(x_s) and the state of row s - 1
(zeros for s = 0), sits at rotary position s, and predicts x_{s+1}. The main model's state is what its head is
given, behind the final norm; a module's is what leaves its layer, before the norm of the head: so does vLLM
serve those checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, apply_rotary_pos_emb

Rotation = tuple[Tensor, Tensor]


class MTPLayer(LlamaDecoderLayer):  # type: ignore[misc]
    """One module; its parameters have the names of a checkpoint's layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, layer_idx=config.num_hidden_layers)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = LlamaRMSNorm(width, eps)
        self.hnorm = LlamaRMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.ModuleDict({"norm": LlamaRMSNorm(width, eps)})
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=config.initializer_range)

    def normed(self, stream: Tensor) -> Tensor:
        """What the head is given, from what leaves the layer [B, T, H]."""
        out: Tensor = self.shared_head["norm"](stream)
        return out

    def unroll(self, embeds: Tensor, state: Tensor, rotation: Rotation, depth: int = 1) -> list[Tensor]:
        """Streams [B, T, H] of ``depth`` passes, each fed with the one before: what recursion computes.

        ``embeds`` and ``state`` [B, T, H] are those of the rows' own tokens; the state is shifted here. A row
        of pass d sees the rows before the draft as pass 0 had them, and of the draft one row of each pass:
        row s stands for the d-th token of a draft that began at row s - d. Rows s < d stand for none.
        """
        keys: list[Tensor] = []
        values: list[Tensor] = []
        out: list[Tensor] = []
        for _ in range(depth):
            given = torch.cat((self.enorm(embeds), self.hnorm(shifted(state))), dim=-1)
            state = self._layer(self.eh_proj(given), rotation, keys, values)
            out.append(state)
        return out

    def _layer(self, hidden: Tensor, rotation: Rotation, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        attention, (batch, length, _) = self.self_attn, hidden.shape
        given = self.input_layernorm(hidden)
        q, k, v = (
            linear(given).view(batch, length, -1, attention.head_dim).transpose(1, 2)
            for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        share = attention.num_key_value_groups
        keys.append(k.repeat_interleave(share, dim=1))
        values.append(v.repeat_interleave(share, dim=1))
        seen = attend(q * attention.scaling, keys, values)
        hidden = hidden + attention.o_proj(seen.transpose(1, 2).reshape(batch, length, -1))
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of pass d = len(keys) - 1; all [B, heads, T, D], ``q`` scaled, keys and values by pass.

    Row s sees rows up to s - d of pass 0, and row s - d + i of each pass i from 1 to d.
    """
    depth, length = len(keys) - 1, q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1 - depth)
    scores = [(q @ keys[0].transpose(-1, -2)).float().masked_fill(hidden, -torch.inf)]
    drafted = [
        (shifted(keys[i], depth - i, dim=2), shifted(values[i], depth - i, dim=2))
        for i in range(1, depth + 1)
    ]
    scores += [(q * k).sum(-1, keepdim=True).float() for k, _ in drafted]
    weights = torch.cat(scores, dim=-1).softmax(-1).to(q.dtype)
    out = weights[..., :length] @ values[0].to(q.dtype)
    for i, (_, v) in enumerate(drafted):
        out = out + weights[..., length + i, None] * v
    return out


def shifted(rows: Tensor, by: int = 1, dim: int = 1) -> Tensor:
    """The rows moved back by ``by`` places along ``dim``, zeros in front."""
    if by == 0:
        return rows
    pad = [0] * (2 * (rows.ndim - dim))
    pad[-2] = by
    return F.pad(rows.narrow(dim, 0, max(0, rows.shape[dim] - by)), pad)
