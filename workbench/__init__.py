"""Inference Workbench: LLM inference techniques as an engine small enough to read.

``Session`` runs recipes on a model, ``Recipe`` says which techniques are on, ``catalog`` lists them,
``measure`` says what they cost, ``compare`` puts two runs side by side. Everything heavy is imported when it
is first used; before that, how OpenMP's threads wait is set for a machine that is shared
(:mod:`workbench.spec.openmp`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from workbench.spec import openmp as _openmp

_openmp.wait_briefly()

if TYPE_CHECKING:
    from workbench.core import catalog, measure
    from workbench.core.session import Session
    from workbench.engine.params import SamplingParams
    from workbench.records.compare import compare
    from workbench.spec.plan import EngineLimits
    from workbench.spec.recipe import Recipe, Use

__all__ = ["EngineLimits", "Recipe", "SamplingParams", "Session", "Use", "catalog", "compare", "measure"]

_HOMES = {
    "EngineLimits": "workbench.spec.plan",
    "Recipe": "workbench.spec.recipe",
    "SamplingParams": "workbench.engine.params",
    "Session": "workbench.core.session",
    "Use": "workbench.spec.recipe",
    "catalog": "workbench.core.catalog",
    "compare": "workbench.records.compare",
    "measure": "workbench.core.measure",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    module = importlib.import_module(home)
    return module if name in ("catalog", "measure") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
