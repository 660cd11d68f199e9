"""What a technique may know when it is bound to its seam."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass

import torch

from workbench.kv.ranges import KVRanges
from workbench.kv.xquant.harm import SharingHarm
from workbench.models.config import ModelConfig
from workbench.spec.plan import Numerics


@dataclass(frozen=True)
class BindContext:
    """What a technique's ``bind`` may know."""

    config: ModelConfig
    dtype: torch.dtype
    numerics: Numerics
    device: torch.device
    page_size: int
    model: str = ""  # its name or folder, and the fingerprint of its weights where they are known
    fingerprint: str = ""
    kv_ranges: KVRanges | None = None  # these two: of techniques that are calibrated, once it was measured
    kv_sharing: SharingHarm | None = None
    kernels: CDLL | None = None  # of the plan's ``compiled``
