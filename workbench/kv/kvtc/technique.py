"""KVTC as a technique: pages that the pool has to give up are kept transform-coded, and come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.kv.at_rest import RowCodec
from workbench.kv.kvtc import config as kvtc
from workbench.kv.kvtc.artefact import Calibration
from workbench.kv.kvtc.codec import Kvtc
from workbench.kv.kvtc.rest import KvtcRows, joint_rows
from workbench.kv.storage import MIB, Storage, limit_option, where_option
from workbench.models.config import ModelConfig
from workbench.spec.technique import TechniqueSpec


@dataclass(frozen=True)
class Config(kvtc.Config):
    """Options of the codec, and of the tier; ``window`` is for saved conversations, cold pages have none."""

    where: str = where_option()
    limit: int = limit_option()


SPEC = TechniqueSpec(
    id="kvtc",
    title="KVTC (KV at rest)",
    family="kv",
    seam="kv_storage",
    kind="lossy",
    summary=(
        "Cached pages that the pool has to give up are decorrelated over all layers and heads, quantized by "
        "a planned bit budget and entropy coded into a bounded tier; a later prompt with the same beginning "
        "gets them back instead of computing them."
    ),
    paper="https://arxiv.org/abs/2511.01815",
    stages=("schedule",),
    claims_slot=("kv_storage",),
    needs=("paged", "prefix_cache"),
    claims=kvtc.CLAIMS,
    sweep=kvtc.SWEEP,
    method_only=kvtc.SHORT,
)


def bind(config: Config, context: Any) -> Storage:
    """The codec at the ratios asked for, once the model is calibrated."""

    def make(measured: Calibration, model_config: ModelConfig, model: str, whole: bool) -> RowCodec:
        codec = Kvtc(
            measured.artefact(config.k_ratio, config.v_ratio),
            joint_rows(model_config),
            model,
            sinks=config.sinks,
            window=config.window if whole else 0,
            entropy=config.entropy,  # type: ignore[arg-type]  # one of its choices
        )
        return KvtcRows(codec) if whole else KvtcRows(codec).ready(context.dtype)

    return Storage("kvtc", make, config.where, config.limit * MIB)
