"""Several KV methods beside each other as one run of kind ``bench``: their numbers, named by method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from workbench.core.kv_result import MethodResult
from workbench.core.quality_windows import QualitySettings
from workbench.core.run_of import run_of
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run

if TYPE_CHECKING:
    from workbench.core.session import Session


def named_metrics(name: str, result: MethodResult, kept: Sequence[str]) -> list[Metric]:
    """The metrics of a method that are called as in ``kept``, named ``name:metric``."""
    return [replace(m, name=f"{name}:{m.name}") for m in result.metrics() if m.name in kept]


def methods_bench(
    session: Session,
    settings: QualitySettings,
    bench: Mapping[str, Any],
    metrics: Sequence[Metric],
    notes: tuple[str, ...],
) -> Run:
    """The run of a benchmark that measured methods and no recipe; ``bench`` has its name and contestants."""
    told = {"bench": bench, "quality": asdict(settings)}
    return run_of(session.plan, "bench", metrics, told, recipe=Recipe(), profile=session.profile, notes=notes)
