"""Planning: does a recipe fit together, the model and the device, and what was negotiated for it.

The only place that knows whether techniques compose. Techniques state slots, needs, provides and
conflicts as data; this module compares them and answers with a :class:`Plan` or with
:class:`Conflict` s whose remedy is a sentence for a person.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from workbench.core import catalog
from workbench.core.binding import BindContext
from workbench.core.plan_drafter import drafter_conflicts
from workbench.core.plan_machine import machine_conflicts
from workbench.core.plan_selection import selection_conflicts
from workbench.core.plan_storage import storage_conflicts
from workbench.models.config import ModelConfig
from workbench.spec.errors import OptionError, PlanError
from workbench.spec.plan import Conflict, DType, EngineLimits, Numerics, Plan
from workbench.spec.recipe import Recipe, Use

DEFAULT_PAGE = 64
DEFAULT_CONTEXT = 2048
MAX_LIMIT = 2**40  # far beyond any memory; larger numbers do not fit an index

_SLOTS = {
    "kv_format": "one KV format at a time",
    "kv_allocation": "one way to allocate KV",
    "weights": "one weight format at a time",
    "drafter": "one drafter at a time",
    "attention": "one attention form at a time",
    "prefix_index": "one prefix index at a time",
    "token_budget": "one token budget",
    "kernels": "one set of kernels",
    "kv_selection": "one KV selection at a time",
    "kv_storage": "one way to keep KV at rest",
    "verify": "one verification rule",
    "draft_control": "one control of drafts",
    "placement": "one place where drafts are made",
}
_NEEDS = {
    "paged": "only pages allocated on demand can be shared or given back",
    "prefix_cache": "without one no prompt finds what was kept",
    "drafter": "without drafts there is nothing to verify or to control",
    "fixed_chain": "a program of fixed shapes needs chains of one length",
}
_FEW = 3  # providers of a need that a remedy names


@dataclass(frozen=True)
class ModelFacts:
    """What planning must know of a model; no weights needed."""

    name: str
    config: ModelConfig
    fingerprint: str = ""


def plan(
    recipe: Recipe,
    model: ModelFacts,
    *,
    device: str = "cpu",
    dtype: DType = "bfloat16",
    numerics: Numerics = "fast",
    limits: EngineLimits | None = None,
) -> Plan | list[Conflict]:
    """The plan of a recipe, or every conflict that prevents one.

    Raises :class:`UnknownTechnique` or :class:`OptionError` when the recipe or a setting cannot be read.
    """
    _check_settings(device, dtype, numerics)
    recipe = catalog.normalise(recipe)
    techniques = [catalog.get(u.id) for u in recipe]
    configs = {u.id: t.configure(dict(u.options)) for u, t in zip(recipe, techniques, strict=True)}
    provides = {p for t in techniques for p in t.spec.provides}
    conflicts = [c for t in techniques for c in _own_conflicts(t, provides, set(configs), device)]
    conflicts += [c for t in techniques for c in machine_conflicts(t.spec, dtype, numerics)]
    conflicts += _slot_conflicts(techniques)
    limits = _fit_limits(limits if limits is not None else EngineLimits(), model.config)
    page_size, page_conflicts = _page_size(configs, model, dtype, numerics, device)
    conflicts += page_conflicts
    conflicts += storage_conflicts(configs, model.config)
    context = _context(model, dtype, numerics, device, page_size)
    conflicts += selection_conflicts(configs, context) + drafter_conflicts(configs, context)
    if conflicts:
        return conflicts
    kinds = {t.spec.kind for t in techniques}
    kind: Literal["exact", "lossy", "simulated"] = (
        "simulated" if "simulated" in kinds else "lossy" if "lossy" in kinds else "exact"
    )
    return Plan(
        recipe=recipe,
        model=model.name,
        model_fingerprint=model.fingerprint,
        device=device,
        dtype=dtype,
        numerics=numerics,
        page_size=page_size,
        limits=limits,
        kind=kind,
        provides=tuple(sorted(provides)),
        notes=_notes(configs, limits, page_size),
        configs=configs,
    )


def require(result: Plan | list[Conflict]) -> Plan:
    """The plan, or :class:`PlanError` carrying the conflicts."""
    if isinstance(result, Plan):
        return result
    raise PlanError("The recipe does not fit: " + "; ".join(str(c) for c in result), conflicts=tuple(result))


def why_not(recipe: Recipe, technique_id: str, model: ModelFacts, **where: Any) -> list[Conflict]:
    """What stands against switching a technique on in addition to a recipe; empty when nothing does."""
    result = plan(recipe.with_(Use(technique_id)), model, **where)
    return [] if isinstance(result, Plan) else result


def matrix(model: ModelFacts, **where: Any) -> dict[tuple[str, str], list[Conflict]]:
    """The compatibility matrix: every pair of techniques, with what each needs switched on as well."""
    out = {}
    ids = list(catalog.MODULES)
    for i, first in enumerate(ids):
        for second in ids[i + 1 :]:
            out[first, second] = pair_conflicts(first, second, model, **where)
    return out


def pair_conflicts(first: str, second: str, model: ModelFacts, **where: Any) -> list[Conflict]:
    """Conflicts between two techniques once everything either of them needs is switched on.

    Those between what they need alone are left out where the two have some of their own.
    """
    result = plan(pair_recipe(first, second), model, **where)
    if isinstance(result, Plan):
        return []
    return [c for c in result if {c.first, c.second} & {first, second}] or result


def pair_recipe(*ids: str) -> Recipe:
    """A recipe of these techniques and of providers for what they need, whatever few provide first."""
    uses = list(ids)
    needs = {need for technique_id in ids for need in catalog.get(technique_id).spec.needs}
    found = {need: [t.id for t in catalog.all_techniques() if need in t.spec.provides] for need in needs}
    for need in sorted(needs, key=lambda n: (len(found[n]), n)):
        if found[need] and not any(need in catalog.get(u).spec.provides for u in uses):
            uses.append(found[need][0])
    return Recipe.of(*uses)


def _own_conflicts(
    technique: catalog.Technique, provides: Collection[str], present: Collection[str], device: str
) -> list[Conflict]:
    spec, out = technique.spec, []
    if not technique.installed:
        remedy = f"{spec.title} needs the package {spec.package}: {technique.install_line}"
        out.append(Conflict(spec.id, "install", spec.package, remedy))
    kind = torch.device(device).type
    if kind not in spec.backends:
        out.append(
            Conflict(spec.id, "device", kind, f"{spec.title} runs on {' or '.join(spec.backends)} only.")
        )
    for need in spec.needs:
        if need not in provides:
            out.append(Conflict(spec.id, "engine", need, _switch_on(need, spec.title)))
    for other, remedy in spec.conflicts.items():
        if other in present:
            out.append(Conflict(spec.id, other, "each other", remedy))
    return out


def _switch_on(need: str, title: str) -> str:
    """The remedy for a need that nothing provides: what to switch on, by title, and why."""
    providers = [t.spec.title for t in catalog.all_techniques() if need in t.spec.provides]
    if not providers:
        return f"{title} needs {need}."
    first = ", ".join(providers[:-1])
    what = " or ".join(p for p in (first, providers[-1]) if p) if len(providers) <= _FEW else f"a {need}"
    return f"Switch on {what}: {_NEEDS.get(need, f'{title} needs it')}."


def _slot_conflicts(techniques: list[catalog.Technique]) -> list[Conflict]:
    out = []
    for i, first in enumerate(techniques):
        for second in techniques[i + 1 :]:
            for slot in set(first.spec.claims_slot) & set(second.spec.claims_slot):
                rule = _SLOTS.get(slot, f"one technique for {slot}")
                out.append(
                    Conflict(
                        second.id, first.id, slot, f"There is {rule}: switch off {first.spec.title} first."
                    )
                )
    return out


def _page_size(
    configs: dict[str, Any], model: ModelFacts, dtype: DType, numerics: Numerics, device: str
) -> tuple[int, list[Conflict]]:
    """The page size every codec can work with; what ``paged`` asks for must be among them."""
    asked = configs["paged"].page_size if "paged" in configs else 0
    size = asked or DEFAULT_PAGE
    context = _context(model, dtype, numerics, device, size)
    out: list[Conflict] = []
    for technique_id, config in configs.items():
        technique = catalog.get(technique_id)
        if technique.spec.seam != "kv_codec":
            continue
        try:
            sizes = technique.bind(config, context).page_sizes(model.config.head_dim)
        except OptionError as err:
            out.append(Conflict(technique_id, "model", "head size", str(err)))
            continue
        if sizes is None or size in sizes:
            continue
        if asked:
            wanted = " or ".join(map(str, sizes))
            paged = catalog.get("paged").spec.title
            remedy = f"Set the page size of {paged} to {wanted}, or to 0 and let the plan choose."
            out.append(Conflict(technique_id, "paged", "page size", remedy))
        size = sizes[0]
    return size, out


def _context(model: ModelFacts, dtype: DType, numerics: Numerics, device: str, page_size: int) -> BindContext:
    return BindContext(
        config=model.config,
        dtype=getattr(torch, dtype),
        numerics=numerics,
        device=torch.device(device),
        page_size=page_size,
        model=model.name,
        fingerprint=model.fingerprint,
    )


def _check_settings(device: object, dtype: object, numerics: object) -> None:
    for name, value, allowed in (
        ("dtype", dtype, get_args(DType)),
        ("numerics", numerics, get_args(Numerics)),
    ):
        if value not in allowed:
            raise OptionError(f"{name} = {value!r} is unknown.", hint=f"Choose {' or '.join(allowed)}.")
    try:
        known = torch.device(device).type in ("cpu", "cuda")  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        known = False
    if not known:
        raise OptionError(f"device = {device!r} is no device.", hint="Choose cpu, cuda, or cuda:N.")


def _fit_limits(limits: EngineLimits, model: ModelConfig) -> EngineLimits:
    """The limits, checked, with a context the model has; asked for none, its own up to the default."""
    if not isinstance(limits, EngineLimits):
        raise OptionError(f"limits = {limits!r} are no engine limits.", hint="Pass EngineLimits(...).")
    for field, low in (
        ("kv_pool_tokens", 1),
        ("max_sequences", 1),
        ("max_batch_tokens", 0),
        ("max_context", 0),
    ):
        value = getattr(limits, field)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value < MAX_LIMIT:
            raise OptionError(
                f"{field} = {value!r} must be a whole number of at least {low}, and below {MAX_LIMIT:,}."
            )
    context = min(limits.max_context or min(model.max_position, DEFAULT_CONTEXT), model.max_position)
    if limits.max_context > model.max_position:
        raise OptionError(
            f"max_context = {limits.max_context} is more than the model's {model.max_position} positions.",
            hint=f"Choose at most {model.max_position}.",
        )
    return replace(limits, max_context=context)


def _notes(configs: dict[str, Any], limits: EngineLimits, page_size: int) -> tuple[str, ...]:
    notes = [f"pages of {page_size} tokens, pool of {limits.kv_pool_tokens} tokens per KV group"]
    if "paged" not in configs:
        notes.append(f"contiguous caches: each sequence reserves {limits.max_context} slots at admission")
    elif configs["paged"].decoded == "resident" and any(
        catalog.get(i).spec.seam == "kv_codec" for i in configs
    ):
        notes.append("a decoded copy of all pages is kept as workspace: coded KV saves no memory here")
    return tuple(notes)
