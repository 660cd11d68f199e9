"""The comparison of drafters in a fresh process: the ``bench`` profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from workbench.core.benchmark import Tell
from workbench.core.benchmark_process import Call, answer, run_in_fresh_process
from workbench.core.drafters.bench import run_drafters
from workbench.core.drafters.settings import DrafterSettings
from workbench.models.progress import Cancel
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

_LISTS = ("prompts", "batches", "weights", "numerics", "vocab", "cells")


def drafters_in_fresh_process(
    settings: DrafterSettings,
    *,
    threads: int | None = None,
    tell: Tell = lambda done, total, message: None,
    cancel: Cancel | None = None,
) -> Run:
    """Measure in a process of its own; what was measured is kept when it is cancelled.

    Raises as :func:`workbench.core.benchmark_process.benchmark_in_fresh_process`.
    """
    settings.chosen()  # refuse wrong names before a process is started
    call = Call("The comparison of drafters", __name__, to_dict(replace(settings, profile="bench")))
    return run_in_fresh_process(call, threads=threads, tell=tell, cancel=cancel)


def main() -> None:
    """The child."""
    answer(lambda settings, tell: run_drafters(from_dict(settings), tell))


def to_dict(settings: DrafterSettings) -> dict[str, Any]:
    """JSON form of the settings."""
    return {**asdict(settings), "drafters": [r.to_json() for r in settings.drafters]}


def from_dict(data: Mapping[str, Any]) -> DrafterSettings:
    """The settings of :func:`to_dict`."""
    lists = {name: tuple(data[name]) for name in _LISTS}
    recipes = tuple(Recipe.from_json(r) for r in data["drafters"])
    return DrafterSettings(**{**data, **lists, "drafters": recipes})
