"""A Hugging Face style configuration from GGUF metadata.

GGUF has no ``config.json``: sizes, RoPE and norms are metadata under llama.cpp's names. What the
file does not state (activation, Gemma's local RoPE base and layer pattern) is fixed per
architecture, as in llama.cpp's own loader. What cannot be expressed is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from workbench.models.gguf_map import BLOCK_NAMES
from workbench.spec.errors import ModelError, UnsupportedModel

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}


def hf_config(
    meta: Mapping[str, Any], names: frozenset[str], vocab_size: int, rope_freqs: np.ndarray | None = None
) -> dict[str, Any]:
    """The ``config.json`` content of a GGUF file.

    ``names``: GGUF tensor names in the file; ``vocab_size``: rows of its embedding; ``rope_freqs``: the
    frequency factors ``[head_dim / 2]`` when the file carries them.
    Raises ``UnsupportedModel`` or ``ModelError``.
    """
    architecture = str(meta.get("general.architecture"))
    if architecture not in _CLASSES:
        raise UnsupportedModel(
            f"The GGUF architecture {architecture!r} is not supported.",
            hint=f"Supported are {', '.join(sorted(BLOCK_NAMES))}; use a safetensors checkpoint instead.",
        )

    def get(key: str, default: Any = None) -> Any:
        value = meta.get(f"{architecture}.{key}", default)
        if value is None:
            raise ModelError(
                f"The GGUF metadata lacks '{architecture}.{key}'.",
                hint="The file is incomplete; download it again or convert it with a current llama.cpp.",
            )
        return value

    hidden, heads = int(get("embedding_length")), int(get("attention.head_count"))
    head_dim = int(get("attention.key_length", hidden // heads))
    if int(get("attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModel("Key and value heads of different width are not supported in GGUF files.")
    if int(get("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel("Partial rotary embeddings are not supported in GGUF files.")
    model_type, cls = _CLASSES[architecture]
    config: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [cls],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": int(get("feed_forward_length")),
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": shortest_float(get("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    rope = {"rope_type": "default", "rope_theta": shortest_float(get("rope.freq_base", 10000.0))}
    rope |= _scaling(meta, architecture, head_dim, rope_freqs)
    if architecture == "gemma3":
        config |= _gemma3(get, rope, config)
    else:
        config["rope_parameters"] = rope
    return config


def _gemma3(get: Any, rope: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Gemma 3: every sixth layer is global, the others see a window with their own RoPE base."""
    layers, pattern = config["num_hidden_layers"], int(get("attention.sliding_window_pattern", 6))
    kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    # llama.cpp: the 27B model (62 layers) scales queries by hidden/heads, the others by head_dim.
    scalar = config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
    local = shortest_float(get("rope.freq_base_swa", 10000.0))
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": int(get("attention.sliding_window")),
        "layer_types": kinds,
        "query_pre_attn_scalar": scalar,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _scaling(
    meta: Mapping[str, Any], architecture: str, head_dim: int, rope_freqs: np.ndarray | None
) -> dict[str, Any]:
    """RoPE scaling, from metadata or from frequency factors (how llama.cpp stores Llama 3 scaling)."""
    if rope_freqs is not None and not np.all(rope_freqs == 1.0):
        theta = float(meta.get(f"{architecture}.rope.freq_base", 10000.0))
        found = {
            "rope_type": "llama3",
            "factor": shortest_float(rope_freqs.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if not np.allclose(_llama3_factors(found, theta, head_dim), rope_freqs, rtol=1e-4):
            raise UnsupportedModel(
                "The file's RoPE frequency factors are not those of Llama 3 scaling.",
                hint="Use the original safetensors checkpoint, whose config.json states the scaling.",
            )
        return found
    kind = meta.get(f"{architecture}.rope.scaling.type", "none")
    factor = meta.get(f"{architecture}.rope.scaling.factor")
    if kind in ("none", "") or factor is None:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": shortest_float(factor)}
    if kind == "yarn":
        original = meta.get(f"{architecture}.rope.scaling.original_context_length")
        if original is not None:
            return {
                "rope_type": "yarn",
                "factor": shortest_float(factor),
                "original_max_position_embeddings": int(original),
            }
    raise UnsupportedModel(
        f"The GGUF RoPE scaling {kind!r} is not supported.",
        hint="Use the original safetensors checkpoint, whose config.json states the scaling.",
    )


def _llama3_factors(rope: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """Divisor of each rotary frequency under Llama 3 scaling, ``[head_dim / 2]``."""
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = original * frequency / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1.0 / ((1 - smooth) / factor + smooth))


def shortest_float(value: Any) -> float:
    """The shortest decimal that a stored float32 stands for: 9.999999747e-06 was written as 1e-5."""
    return float(str(np.float32(value)))
