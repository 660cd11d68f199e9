"""CacheGen as a technique: pages that the pool has to give up are kept range-coded, and come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.kv.at_rest import RowCodec
from workbench.kv.cachegen.artefact import Artefact
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.levels import LEVELS
from workbench.kv.cachegen.rest import CacheGenRows, full_layout
from workbench.kv.storage import MIB, Storage, limit_option, where_option
from workbench.models.config import ModelConfig
from workbench.spec.technique import Claim, TechniqueSpec, option

_LEVELS = {"/".join(map(str, level.k)): level for level in LEVELS}
"""Levels by the bins of their keys, which no two share."""


@dataclass(frozen=True)
class Config:
    """The loss level, and the tier."""

    level: str = option(
        "32/32/32",
        choices=tuple(_LEVELS),
        unit="bins",
        help="Quantization bins of each third of the layers; fewer lose more.",
    )
    where: str = where_option()
    limit: int = limit_option()


SPEC = TechniqueSpec(
    id="cachegen",
    title="CacheGen (KV at rest)",
    family="kv",
    seam="kv_storage",
    kind="lossy",
    summary=(
        "Cached pages that the pool has to give up are quantized per token and range coded with calibrated "
        "tables per layer and channel into a bounded tier; a later prompt with the same beginning gets them "
        "back instead of computing them."
    ),
    paper="https://arxiv.org/abs/2310.07240",
    stages=("schedule",),
    claims_slot=("kv_storage",),
    needs=("paged", "prefix_cache"),
    method_only=dict.fromkeys(("bins", "k", "v", "delta"), ("level",)),
    extra="codec",
    package="constriction",
    claims=(
        Claim(
            "3.5x to 4.3x smaller than 8-bit KV at negligible loss of quality",
            "Mistral-7B, Llama-34B and 70B; LongChat, TriviaQA, NarrativeQA, WikiText; against 8-bit KV",
            "https://arxiv.org/abs/2310.07240",
        ),
    ),
)


def bind(config: Config, context: Any) -> Storage:
    """The codec at one level, once the model is calibrated."""
    level = _LEVELS[config.level]

    def make(measured: Artefact, model_config: ModelConfig, model: str, whole: bool) -> RowCodec:
        return CacheGenRows(CacheGen(measured, full_layout(model_config), model), level)

    return Storage("cachegen", make, config.where, config.limit * MIB)
