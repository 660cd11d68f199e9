"""Which of the models that ship with the repository a technique can be shown on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from workbench.core.plan import ModelFacts, pair_recipe, plan
from workbench.models.names import SHIPPED_MODELS
from workbench.models.registry import open_source


@cache
def shipped_facts(model: str) -> ModelFacts:
    """What planning knows of a shipped model; its weights are not hashed for it."""
    return ModelFacts(model, open_source(model).config)


def fitting_model(ids: Iterable[str]) -> str:
    """The first shipped model that has what each of these techniques needs; the very first if none has."""
    chosen = tuple(ids)
    return next((m for m in SHIPPED_MODELS if all(_fits(i, m) for i in chosen)), SHIPPED_MODELS[0])


@cache
def _fits(id: str, model: str) -> bool:
    made = plan(pair_recipe(id), shipped_facts(model))
    return not isinstance(made, list) or not any(c.second == "model" for c in made)
