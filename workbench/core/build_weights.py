"""From a plan to its weight set: 16-bit weights, a weight format, or weights for compiled kernels."""

from __future__ import annotations

from typing import Any

import torch

from workbench.core import catalog
from workbench.core.bound import bound, context_of
from workbench.models.compiled import compiled_pack
from workbench.models.config import ModelConfig
from workbench.models.plain import plain_pack
from workbench.models.progress import Cancel, Progress
from workbench.models.source import Source
from workbench.models.weightset import HEAD, Pack, WeightSet, build_weight_set
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe


def weights_key(plan: Plan) -> tuple[str, str, str, str, str]:
    """What a weight set depends on: two plans with equal keys share one."""
    weights = [u for u in plan.recipe if catalog.get(u.id).spec.seam in ("weights", "kernels")]
    return plan.model, plan.dtype, plan.numerics, plan.device, Recipe(tuple(weights)).key


def plain_weights(plan: Plan, config: ModelConfig) -> Pack:
    """The pack of weights that no method codes, for the plan's kernels: a draft head's too."""
    kernels = bound(plan, "kernels", config)
    if kernels is not None:
        return compiled_pack(kernels, config.activation)
    return plain_pack(getattr(torch, plan.dtype), plan.numerics, plan.device, activation=config.activation)


def head_pack(plan: Plan, config: ModelConfig, bits: int) -> Pack:
    """The pack of a draft head: 16-bit weights as the plan's kernels take them, or rounded to ``bits``."""
    if bits == 16:
        return plain_weights(plan, config)
    rounding = catalog.get("rtn")
    context = context_of(plan, config, kernels=bound(plan, "kernels", config))
    method: Any = rounding.bind(rounding.configure({"bits": bits}), context)

    def pack(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        named = "head" if name == HEAD else name  # rounded like the rest
        return method.pack(
            named, weight, bias, dtype=getattr(torch, plan.dtype), numerics=plan.numerics, device=plan.device
        )

    return pack


def build_weights(
    plan: Plan, source: Source, progress: Progress | None = None, cancel: Cancel | None = None
) -> WeightSet:
    """Pack the plan's weight set; cancellable between layers, progress per layer."""
    dtype = getattr(torch, plan.dtype)
    method = bound(plan, "weights", source.config, kernels=bound(plan, "kernels", source.config))
    if method is None:
        pack = plain_weights(plan, source.config)
    else:

        def pack(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
            return method.pack(name, weight, bias, dtype=dtype, numerics=plan.numerics, device=plan.device)

    return build_weight_set(
        source,
        pack,
        dtype,
        plan.numerics,
        progress,
        cancel,
        method=method.name if method is not None else "plain",
        device=plan.device,
    )
