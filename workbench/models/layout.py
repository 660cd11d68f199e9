"""Which tensors a checkpoint must hold, and their shapes, given its configuration.

Used to refuse a checkpoint before any of it is used: a missing shard, a truncated file or the
wrong configuration is named by tensor, with the shape expected and the shape found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from workbench.models.config import ModelConfig
from workbench.spec.errors import MissingTensor, WrongShape

HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"
FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the decoder reads; a tied head is not among them."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    linears = {
        "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for stem, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}.{stem}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{stem}.bias"] = (rows,)
        shapes |= {f"{prefix}.{norm}.weight": (hidden,) for norm in norms}
        if config.qk_norm:
            shapes |= {f"{prefix}.self_attn.{norm}.weight": (dim,) for norm in ("q_norm", "k_norm")}
    return shapes


def check_layout(
    config: ModelConfig,
    names: Collection[str],
    describe: Callable[[str], tuple[tuple[int, ...], str]],
    where: str,
) -> None:
    """Check every expected tensor: present, of the expected shape, of a float dtype.

    ``describe(name) -> (shape, dtype name)``. Raises ``MissingTensor`` or ``WrongShape`` naming the tensor.
    """
    wanted = expected_shapes(config)
    missing = sorted(set(wanted) - set(names))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MissingTensor(
            f"{where} lacks the tensor {missing[0]!r}{more}.",
            hint=_head_hint() if missing[0] == HEAD else "The checkpoint is incomplete; fetch it again.",
        )
    for name, shape in wanted.items():
        found, dtype = describe(name)
        if tuple(found) != shape:
            raise WrongShape(
                f"{where}: {name!r} has shape {tuple(found)}, but the configuration expects {shape}.",
                hint="config.json and the weights belong to different models.",
            )
        if dtype not in FLOATS:
            raise WrongShape(
                f"{where}: {name!r} is stored as {dtype}, but a float tensor is expected.",
                hint=f"Readable: {', '.join(sorted(FLOATS))}. Quantized checkpoints are not read here.",
            )
    # A bias that the configuration does not announce would be dropped in silence.
    modules = tuple(f"model.layers.{config.num_layers + k}." for k in range(config.mtp_modules))
    surplus = sorted(
        n for n in names if n.endswith("_proj.bias") and n not in wanted and not n.startswith(modules)
    )
    if surplus:
        raise WrongShape(
            f"{where} holds {surplus[0]!r}, which the configuration does not announce.",
            hint="Set attention_bias / mlp_bias in config.json to match the weights.",
        )


def tie_flag(hf: Mapping[str, Any]) -> bool | None:
    """``tie_word_embeddings`` as written: of the text part if it says so, else the top level; else None."""
    text = hf.get("text_config")
    for scope in (text if isinstance(text, Mapping) else {}, hf):
        if scope.get("tie_word_embeddings") is not None:
            return bool(scope["tie_word_embeddings"])
    return None


def resolve_tie(hf: Mapping[str, Any], head_present: bool, where: str) -> bool:
    """Whether the output head is the embedding.

    True, or no flag and no head in the file: tied. No flag but a head: its own head. False without
    a head: ``MissingTensor``, because a head of random values would be the only alternative.
    """
    flag = tie_flag(hf)
    if flag is False and not head_present:
        raise MissingTensor(
            f"{where} lacks the tensor {HEAD!r}, and config.json says tie_word_embeddings=false.",
            hint=_head_hint(),
        )
    return (not head_present) if flag is None else flag


def _head_hint() -> str:
    return "Fetch the checkpoint again, or set tie_word_embeddings to true if the model shares its embedding."
