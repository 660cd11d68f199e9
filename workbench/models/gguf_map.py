"""From GGUF tensor names and layouts to the canonical Hugging Face ones.

llama.cpp renames every tensor and, for two architectures, also changes values:
``llama`` interleaves the rotary halves of the query and key rows (``LlamaModel.permute`` in its
converter), ``gemma3`` stores norm gains as ``1 + w``. Both are undone exactly here; the other
architectures keep their rows.
"""

from __future__ import annotations

import re

import torch

from workbench.spec.errors import UnsupportedModel

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}

# Gemma 3 has four norms per block; "ffn_norm" is the one before the MLP, not the one after attention.
_GEMMA3_BLOCK = _BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

BLOCK_NAMES = {"llama": _BLOCK, "qwen2": _BLOCK, "qwen3": _BLOCK, "gemma3": _GEMMA3_BLOCK}

IGNORED = frozenset({"rope_freqs.weight"})
"""Tensors that are configuration rather than weights (RoPE frequency factors, see ``gguf_config``)."""

_NAME = re.compile(r"^(?:blk\.(?P<layer>\d+)\.)?(?P<stem>[a-z_]+)\.(?P<kind>weight|bias)$")


def hf_name(architecture: str, name: str) -> str:
    """The Hugging Face name of GGUF tensor ``name``; raises ``UnsupportedModel`` for unknown ones."""
    if architecture not in BLOCK_NAMES:
        raise UnsupportedModel(
            f"The GGUF architecture {architecture!r} is not supported.",
            hint=f"Supported are {', '.join(sorted(BLOCK_NAMES))}; use a safetensors checkpoint instead.",
        )
    match = _NAME.match(name)
    if match is not None:
        table = _TOP if match["layer"] is None else BLOCK_NAMES[architecture]
        stem = table.get(match["stem"])
        if stem is not None:
            prefix = "" if match["layer"] is None else f"model.layers.{match['layer']}."
            return f"{prefix}{stem}.{match['kind']}"
    raise UnsupportedModel(
        f"The GGUF tensor {name!r} has no place in a {architecture} model.",
        hint="The file holds an architecture variant that is not supported; use a safetensors checkpoint.",
    )


def unpermute_rows(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo llama.cpp's rotary row order: ``[heads * D, ...]`` from interleaved pairs to halves.

    ``heads`` is the number of heads these rows have: key rows use the key/value head count.
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def restore(architecture: str, name: str, tensor: torch.Tensor, heads: int, kv_heads: int) -> torch.Tensor:
    """Values of ``tensor`` as the Hugging Face checkpoint has them; ``name`` is the GGUF name."""
    if architecture == "llama" and ".attn_q." in name:
        return unpermute_rows(tensor, heads)
    if architecture == "llama" and ".attn_k." in name:
        return unpermute_rows(tensor, kv_heads)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor - 1.0
    return tensor
