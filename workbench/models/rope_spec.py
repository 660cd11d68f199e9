"""RoPE settings as plain data, read from every spelling checkpoints use.

``rope_parameters`` (transformers 5, flat or nested per layer type), ``rope_scaling`` with
``rope_type`` or the older ``type``, and a bare ``rope_theta`` all end in the same ``RopeSpec``.
Anything derived from two settings (attention factor, original context) is resolved here once, so
that nothing downstream can read a half-set scaling. Unknown kinds and keys that would change the
phases are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workbench.spec.errors import UnsupportedModel

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
_REQUIRED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding. ``original_max`` counts tokens; ``attention_factor`` scales cos and sin."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max: int = 0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def derived_limit(self, declared: int) -> int:
        """Context (tokens) the scaling was made for, given the declared ``max_position_embeddings``.

        YaRN and linear interpolation stretch the original context by ``factor`` whether or not the
        declared length already says so; the other kinds are declared at their full length.
        """
        if self.kind in ("linear", "yarn"):
            return max(declared, int(self.original_max * self.factor))
        return declared


def rope_spec(parameters: Mapping[str, Any], theta: float, max_position: int, head_dim: int) -> RopeSpec:
    """Read one rope dictionary.

    ``theta`` is the value beside it in the config, ``max_position`` the declared context in
    tokens. Raises ``UnsupportedModel`` naming the kind, the missing key, or a factor list that is
    not ``head_dim // 2`` long.
    """
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind not in KINDS:
        raise UnsupportedModel(
            f"RoPE kind {kind!r} is not implemented.", hint=f"Implemented: {', '.join(KINDS)}."
        )
    if float(parameters.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedModel(
            "A partial rotary embedding (partial_rotary_factor) is not implemented.",
            hint="The families supported here rotate the whole head.",
        )
    for key in _REQUIRED.get(kind, ()):
        derivable = kind == "yarn" and "original_max_position_embeddings" in parameters
        if parameters.get(key) is None and not derivable:
            raise UnsupportedModel(f"RoPE kind {kind!r} needs {key!r}.", hint=f"Given: {sorted(parameters)}.")
    original = int(parameters.get("original_max_position_embeddings") or max_position)
    factor = parameters.get("factor")
    factor = float(factor) if factor is not None else max_position / original
    if kind != "default" and factor <= 0:
        raise UnsupportedModel(f"RoPE factor must be positive, not {factor}.", hint="Check rope_parameters.")
    for key in ("short_factor", "long_factor"):
        if kind == "longrope" and len(parameters[key]) != head_dim // 2:
            raise UnsupportedModel(
                f"RoPE {key!r} has {len(parameters[key])} entries, not {head_dim // 2}.",
                hint="Its length must be head_dim / 2.",
            )
    return RopeSpec(
        kind=kind,
        theta=float(parameters.get("rope_theta") or theta),
        factor=factor if kind != "default" else 1.0,
        original_max=original,
        attention_factor=_attention_factor(kind, parameters, factor, original),
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        truncate=bool(parameters.get("truncate", True)),
        short_factor=tuple(map(float, parameters.get("short_factor") or ())),
        long_factor=tuple(map(float, parameters.get("long_factor") or ())),
    )


def _attention_factor(kind: str, parameters: Mapping[str, Any], factor: float, original: int) -> float:
    """Scale of cos and sin: YaRN (arXiv 2309.00071, sec. 3.4) or LongRoPE (arXiv 2402.13753)."""
    given = parameters.get("attention_factor")
    if kind not in ("yarn", "longrope") or given is not None:
        return float(given) if given is not None and kind in ("yarn", "longrope") else 1.0
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, mscale_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if mscale and mscale_all:
        return _mscale(factor, float(mscale)) / _mscale(factor, float(mscale_all))
    return _mscale(factor, 1.0)


def _mscale(scale: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(scale) + 1.0
