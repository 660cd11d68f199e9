"""A finished measurement as a :class:`Run`: what follows from the plan it was made under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from workbench.core.provenance import provenance
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run, plain


def run_of(
    plan: Plan,
    kind: str,
    metrics: Sequence[Metric],
    told: Mapping[str, Any],
    *,
    recipe: Recipe | None = None,
    profile: str | None = None,
    **rest: Any,
) -> Run:
    """The run, done: ``told`` goes into its plan, ``rest`` are further fields of :class:`Run`.

    ``recipe`` stands for the plan's where something else was measured on the plan's engine. Without a
    ``profile`` there is no provenance.
    """
    recipe = plan.recipe if recipe is None else recipe
    return Run(
        id=uuid4().hex,
        kind=kind,
        model=plan.model,
        weight_hash=plan.model_fingerprint,
        recipe=[dict(u) for u in recipe.to_json()],
        recipe_key=recipe.key,
        plan=plain({**plan.to_dict(), **told}),
        numerics=plan.numerics,
        dtype=plan.dtype,
        seed=0,
        state="done",
        metrics=tuple(metrics),
        provenance=None if profile is None else provenance(plan.device, profile),
        **rest,
    )
