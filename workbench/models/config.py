"""What a decoder needs to know about a model, whatever its family calls it.

``ModelConfig.from_hf`` reads the ``config.json`` of Llama / SmolLM, Mistral, Qwen2, Qwen3 and
Gemma 3 (text, or the text part of the multimodal config). Family differences become plain fields
here (bias, q/k norm, norm offset, sandwich norms, windows), so that nothing above asks for a
model type. The config is frozen: a late change raises instead of being ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.models.rope_spec import RopeSpec, rope_spec
from workbench.spec.errors import UnsupportedModel

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
FULL, SLIDING = "full_attention", "sliding_attention"
MAX_LAYERS = 4096
MAX_MODULES = 64


@dataclass(frozen=True)
class KVGroup:
    """Layers whose tokens are visible alike: ``window`` tokens including the query's own, or all.

    ``heads``: the KV heads ``first`` to ``end - 1`` that it holds; None: all of them.
    """

    layers: tuple[int, ...]
    window: int | None
    heads: tuple[int, int] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and structure of one decoder-only model.

    ``sliding_window`` counts the keys a query of a sliding layer may see, its own included.
    ``query_scale`` multiplies q before attention; ``norm_offset`` is added to every norm gain;
    ``max_position`` is the context limit in tokens, RoPE scaling included.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    rope: tuple[tuple[str, RopeSpec], ...]
    """(layer type, rotary embedding) of each layer type in use."""
    max_position: int
    sliding_window: int | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    qk_norm: bool = False
    sandwich_norms: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    scale_embedding: bool = False
    """Multiply embeddings by sqrt(hidden_size), rounded to the weight set's dtype (Gemma)."""
    tie_embeddings: bool = False
    query_scale: float = 1.0
    attn_softcap: float | None = None
    final_softcap: float | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    mtp_modules: int = field(default=0, repr=False)
    """Modules of multi-token prediction behind the layers; the model itself computes without them."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face ``config.json`` already parsed.

        Raises ``UnsupportedModel`` for an unknown model type, RoPE kind or activation, a missing
        size, a value of a wrong kind or out of range, and heads that do not divide.
        """
        kind = hf.get("model_type")
        if kind == "gemma3" and isinstance(hf.get("text_config"), Mapping):
            outer = {k: hf[k] for k in ("tie_word_embeddings", "eos_token_id", "bos_token_id") if k in hf}
            return cls.from_hf({**outer, **hf["text_config"], "model_type": "gemma3_text"})
        if kind not in FAMILIES:
            raise UnsupportedModel(
                f"Model type {kind!r} is not implemented.", hint=f"Implemented: {', '.join(FAMILIES)}."
            )
        try:
            return _read(str(kind), hf)
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UnsupportedModel(
                f"config.json holds a value of a wrong kind: {error}.", hint="Fetch the checkpoint again."
            ) from None

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers of one visibility together, in order of their first layer."""
        groups: dict[int | None, list[int]] = {}
        for layer in range(self.num_layers):
            groups.setdefault(self.window(layer), []).append(layer)
        return tuple(KVGroup(tuple(layers), window) for window, layers in groups.items())

    def window(self, layer: int) -> int | None:
        """Keys visible to a query of ``layer`` (its own included), or None for all."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def rope_of(self, layer_type: str) -> RopeSpec:
        """Rotary embedding of a layer type in use."""
        return dict(self.rope)[layer_type]

    def with_max_position(self, tokens: int) -> ModelConfig:
        """The same model with another context limit, which also fixes length-dependent RoPE kinds."""
        if tokens < 1:
            raise UnsupportedModel(
                f"The context limit must be at least 1 token, not {tokens}.",
                hint="Give a positive number of tokens.",
            )
        return replace(self, max_position=tokens)


def _read(kind: str, hf: Mapping[str, Any]) -> ModelConfig:
    gemma = kind == "gemma3_text"
    hidden, heads = _size(hf, "hidden_size"), _size(hf, "num_attention_heads")
    layers = _size(hf, "num_hidden_layers")
    if layers > MAX_LAYERS:
        raise UnsupportedModel(
            f"config.json: {layers:,} layers are absurd; at most {MAX_LAYERS:,} are read.",
            hint="Fetch the checkpoint again.",
        )
    kv_heads = int(hf.get("num_key_value_heads") or heads)
    head_dim = int(hf.get("head_dim") or {"qwen3": 128, "gemma3_text": 256}.get(kind, hidden // heads))
    if heads % kv_heads:
        raise UnsupportedModel(
            f"{heads} query heads cannot share {kv_heads} key/value heads evenly.",
            hint="num_attention_heads must be a multiple of num_key_value_heads.",
        )
    if head_dim % 2:
        raise UnsupportedModel(f"RoPE needs an even head_dim, not {head_dim}.", hint="Check head_dim.")
    if gemma and hf.get("use_bidirectional_attention"):
        raise UnsupportedModel(
            "Bidirectional Gemma 3 (an encoder) is not a decoder.",
            hint="Use a checkpoint without use_bidirectional_attention.",
        )
    declared = int(hf.get("max_position_embeddings") or {"llama": 2048, "mistral": 131072}.get(kind, 32768))
    norm_eps = float(hf.get("rms_norm_eps", 1e-6))
    for name, low in (("max_position_embeddings", declared - 1), ("rms_norm_eps", norm_eps)):
        if not 0 <= low < math.inf:
            raise UnsupportedModel(
                f"config.json: {name!r} cannot be {hf.get(name)!r}.", hint="Fetch the checkpoint again."
            )
    window, layer_types = _visibility(kind, hf, layers)
    rope = _ropes(kind, hf, layer_types, declared, head_dim)
    attention_bias = bool(hf.get("attention_bias", False)) and kind != "mistral"
    scalar = float(hf.get("query_pre_attn_scalar") or 256) if gemma else float(head_dim)
    return ModelConfig(
        model_type=kind,
        vocab_size=_size(hf, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_size(hf, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layer_types=layer_types,
        rope=rope,
        # Gemma declares the stretched length already; its two ropes disagree on the factor.
        max_position=declared if gemma else max(spec.derived_limit(declared) for _, spec in rope),
        sliding_window=window,
        norm_eps=norm_eps,
        norm_offset=1.0 if gemma else 0.0,
        qk_norm=kind in ("qwen3", "gemma3_text"),
        sandwich_norms=gemma,
        qkv_bias=attention_bias or kind == "qwen2",
        o_bias=attention_bias and kind != "qwen2",
        mlp_bias=bool(hf.get("mlp_bias", False)) and kind == "llama",
        activation=_activation(hf, gemma),
        scale_embedding=gemma,
        tie_embeddings=bool(hf.get("tie_word_embeddings", gemma)),
        query_scale=scalar**-0.5,
        attn_softcap=_optional(hf.get("attn_logit_softcapping")) if gemma else None,
        final_softcap=_optional(hf.get("final_logit_softcapping")) if gemma else None,
        bos_id=hf.get("bos_token_id"),
        eos_ids=_ids(hf.get("eos_token_id")),
        mtp_modules=_modules(hf),
    )


def _visibility(kind: str, hf: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[str, ...]]:
    """Sliding window (None when no layer uses it) and the attention type of each layer."""
    window = hf.get("sliding_window", 4096 if kind != "llama" else None)
    if kind == "llama" or (kind in ("qwen2", "qwen3") and not hf.get("use_sliding_window", False)):
        window = None
    types = hf.get("layer_types")
    if window is None:
        types = [FULL] * layers
    elif kind == "mistral":
        types = [SLIDING] * layers
    elif types is None and kind == "gemma3_text":
        pattern = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6)
        types = [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]
    elif types is None:
        first = int(hf.get("max_window_layers", 28))
        types = [SLIDING if i >= first else FULL for i in range(layers)]
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown or len(types) != layers:
        raise UnsupportedModel(
            f"layer_types: {len(types)} entries for {layers} layers, unknown kinds {unknown}.",
            hint=f"Implemented: {FULL}, {SLIDING}.",
        )
    return (int(window) if window is not None and SLIDING in types else None), tuple(types)


def _ropes(
    kind: str, hf: Mapping[str, Any], layer_types: tuple[str, ...], declared: int, head_dim: int
) -> tuple[tuple[str, RopeSpec], ...]:
    """The rotary embedding of each layer type in use, from any of the spellings."""
    given = dict(hf.get("rope_parameters") or {})
    scaling = dict(hf.get("rope_scaling") or {})
    nested = any(key in (FULL, SLIDING) for key in given)
    specs = []
    for layer_type in sorted(set(layer_types)):
        local = kind == "gemma3_text" and layer_type == SLIDING
        theta = float(hf.get("rope_theta") or (1_000_000.0 if kind == "gemma3_text" else 10_000.0))
        parameters = dict(given.get(layer_type) or {}) if nested else {**given, **scaling}
        if local and not nested:  # Gemma's local layers never take the global scaling
            parameters = {}
        if local:
            theta = float(hf.get("rope_local_base_freq") or 10_000.0)
        if nested and not local:
            parameters.update(scaling)
        if "original_max_position_embeddings" in hf:
            parameters["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
        specs.append((layer_type, rope_spec(parameters, theta, declared, head_dim)))
    return tuple(specs)


def _activation(hf: Mapping[str, Any], gemma: bool) -> str:
    name = hf.get("hidden_activation") if gemma else hf.get("hidden_act")
    name = name or ("gelu_pytorch_tanh" if gemma else "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"Activation {name!r} is not implemented.", hint=f"Implemented: {', '.join(ACTIVATIONS)}."
        )
    return str(name)


def _size(hf: Mapping[str, Any], key: str) -> int:
    value = hf.get(key)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(
            f"config.json: {key!r} must be a positive integer, not {value!r}.",
            hint="The file is incomplete or not a text decoder's.",
        )
    return value


def _modules(hf: Mapping[str, Any]) -> int:
    value = hf.get("num_nextn_predict_layers") or 0
    if not isinstance(value, int) or not 0 <= value <= MAX_MODULES:
        raise UnsupportedModel(
            f"config.json: 'num_nextn_predict_layers' cannot be {value!r}.",
            hint=f"It counts modules of multi-token prediction, {MAX_MODULES} at most.",
        )
    return value


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(v) for v in value) if isinstance(value, (list, tuple)) else (int(value),)
