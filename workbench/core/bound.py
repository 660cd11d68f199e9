"""A plan's techniques, bound to their seams."""

from __future__ import annotations

from typing import Any

import torch

from workbench.attention.compiled import CompiledPages
from workbench.core import catalog
from workbench.core.binding import BindContext
from workbench.engine.seams import AttentionOp
from workbench.models.config import ModelConfig
from workbench.spec.plan import Plan


def context_of(plan: Plan, config: ModelConfig, **measured: Any) -> BindContext:
    """What the plan's techniques may know when they bind."""
    return BindContext(
        config=config,
        dtype=getattr(torch, plan.dtype),
        numerics=plan.numerics,
        device=torch.device(plan.device),
        page_size=plan.page_size,
        model=plan.model,
        fingerprint=plan.model_fingerprint,
        **measured,
    )


def bound(plan: Plan, seam: str, config: Any, **measured: Any) -> Any:
    """The plan's technique on a seam, bound, with what was measured for it (fields of the context); None when
    the seam is left to the engine."""
    for use in plan.recipe:
        technique = catalog.get(use.id)
        if technique.spec.seam == seam:
            return technique.bind(plan.configs[use.id], context_of(plan, config, **measured))
    return None


def attention_op(plan: Plan, config: ModelConfig) -> AttentionOp:
    """The plan's attention form, or the default one for its numerics class and kernels."""
    chosen: AttentionOp | None = bound(plan, "attention", config)
    if chosen is not None:
        return chosen
    kernels = bound(plan, "kernels", config)
    if kernels is not None:
        return CompiledPages(kernels)
    sdpa = catalog.get("sdpa")
    op: AttentionOp = sdpa.bind(sdpa.configure({}), context_of(plan, config))
    return op
