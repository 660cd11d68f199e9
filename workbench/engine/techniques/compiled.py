"""Compiled CPU kernels: linears, layers and decode attention in C++, built on this machine at first use.

Stored weights and roundings are those of the torch path; only the order of sums differs. A layer is two calls
instead of forty operations, a weight is read at the speed of memory, and K and V are read where they lie. A
greedy chain of a draft head of one layer is one call, all its steps.
"""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import dataclass
from typing import Any

from workbench.models.compiled import kernels
from workbench.spec.technique import TechniqueSpec


@dataclass(frozen=True)
class Config:
    """No options: kernels follow from the processor, tiles from the number of rows."""


SPEC = TechniqueSpec(
    id="compiled",
    title="Compiled CPU kernels",
    family="engine",
    seam="kernels",
    kind="exact",
    summary=(
        "Layers and decode attention in C++, compiled for this CPU at first use (seconds, then cached). "
        "Weights of another method keep their own kernels; attention is compiled unless another is chosen."
    ),
    paper="https://doi.org/10.1145/1356052.1356053",  # packed panels: Goto and van de Geijn 2008
    stages=("prefill", "decode"),
    claims_slot=("kernels",),
    backends=("cpu",),
    dtypes=("bfloat16",),
    numerics=("fast",),
    compiler=True,
)


def bind(config: Config, context: Any) -> CDLL:
    """The library, compiled now if this machine has not done so before. Raises ``CompilerError``."""
    return kernels()
