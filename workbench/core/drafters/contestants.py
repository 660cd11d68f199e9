"""Engines that compete in a cell: plain decoding, and every drafter, on one set of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from workbench.core import catalog
from workbench.core.bound import bound
from workbench.core.build import build_engine
from workbench.core.build_kv import build_kv
from workbench.core.drafters.settings import PLAIN, Cell, DrafterSettings, weights_of
from workbench.core.kv_groups import drafter_layers
from workbench.core.plan import ModelFacts, plan, require, why_not
from workbench.engine.engine import Engine
from workbench.engine.exit_runner import ExitDrafter
from workbench.models.config import ModelConfig
from workbench.models.decoder import Decoder
from workbench.models.heads import HeadFile, find_head
from workbench.spec.errors import OptionError, WorkbenchError
from workbench.spec.plan import EngineLimits, Plan
from workbench.spec.recipe import Recipe, Use


@dataclass(frozen=True)
class Traits:
    """``batched``: it drafts for all sequences in passes of its own. ``own_forward``: see ``forecast``."""

    batched: bool
    own_forward: bool


def traits_of(plan: Plan, config: ModelConfig) -> Traits:
    """Those of a plan's drafter."""
    drafter = bound(plan, "drafter", config)
    trained = any(catalog.get(u.id).spec.trained for u in plan.recipe)
    leaves_early = isinstance(drafter, ExitDrafter)
    return Traits(trained or leaves_early or bool(drafter_layers(plan, config)), leaves_early)


def recipes(settings: DrafterSettings, facts: ModelFacts) -> dict[str, Recipe]:
    """All that compete, by name, plain first; those that ``settings`` name, or all that run here.

    Raises :class:`OptionError` for one without a drafter, and when none is left.
    """
    named = settings.drafters or tuple(Recipe.of(i) for i in usable(settings, facts))
    out = {PLAIN: Recipe()}
    for recipe in named:
        if not any(catalog.get(u.id).spec.seam == "drafter" for u in recipe):
            raise OptionError(f"{recipe} has no drafter.", hint="Name one, such as ngram or eagle3.")
        out[_name(recipe)] = recipe
        for most in settings.vocab:
            if (other := _limited(recipe, most)) is not None:
                out[_name(other)] = other
    if len(out) == 1:
        raise OptionError("No drafter runs on this model.", hint="Name one with --contestant to see why.")
    return out


def usable(settings: DrafterSettings, facts: ModelFacts) -> list[str]:
    """Drafters of the catalogue that fit the model, its weights as they are."""
    where: dict[str, Any] = {
        "dtype": settings.dtype,
        "device": settings.device,
        "numerics": settings.numerics[0],
    }
    ids = [t.id for t in catalog.all_techniques() if t.spec.seam == "drafter"]
    return [i for i in ids if not why_not(Recipe.of("paged"), i, facts, **where)]


def planned(
    recipe: Recipe, cell: Cell, settings: DrafterSettings, facts: ModelFacts, limits: EngineLimits
) -> Plan:
    """The plan of a recipe in a cell: paged, with the cell's weights, and the kernels plain decoding takes.

    Those are compiled ones where they fit the cell. Raises :class:`PlanError` with what stands against it.
    """
    where: dict[str, Any] = {"device": settings.device, "dtype": settings.dtype, "numerics": cell.numerics}
    base = Recipe.of(*weights_of(cell.weights), "paged")
    compiled = base.with_("compiled")
    if isinstance(plan(compiled, facts, limits=limits, **where), Plan):
        base = compiled
    own = {u.id for u in recipe}
    whole = Recipe((*(u for u in base if u.id not in own), *recipe))
    return require(plan(whole, facts, limits=limits, **where))


def limits_of(prompts: Sequence[Sequence[int]], tokens: int, cell: Cell, longest: int) -> EngineLimits:
    """Room for a batch of the longest prompts with their answers, and drafts on top, in whole pages."""
    slots = min(max(map(len, prompts)) + tokens + 64, longest)
    pages = -(-slots // 64) + 2
    return EngineLimits(kv_pool_tokens=64 * pages * cell.batch, max_sequences=cell.batch, max_context=slots)


@contextlib.contextmanager
def engines(plans: Mapping[str, Plan], decoder: Decoder, eos: tuple[int, ...]) -> Iterator[dict[str, Engine]]:
    """Idle engines of ``plans`` on one decoder, each with a KV pool of its own, closed at the end."""
    made: dict[str, Engine] = {}
    with contextlib.ExitStack() as stack, torch.inference_mode():
        for name, one in plans.items():
            kv = build_kv(one, decoder)
            stack.callback(kv.close)
            made[name] = build_engine(one, decoder, kv, None, eos)
        yield made


def heads_of(recipe: Recipe, facts: ModelFacts) -> list[HeadFile]:
    """Files of trained heads that a recipe drafts with."""
    out = []
    for use in recipe:
        technique = catalog.get(use.id)
        if technique.spec.seam != "drafter" or not technique.spec.trained:
            continue
        kind = str(getattr(technique.configure(dict(use.options)), "head", use.id))
        with contextlib.suppress(WorkbenchError):  # of those trained with the model there is no file
            out.append(find_head(facts.name, kind, facts.fingerprint))
    return out


def _name(recipe: Recipe) -> str:
    return str(catalog.normalise(recipe)).replace(" ", "")


def _limited(recipe: Recipe, most: int) -> Recipe | None:
    """The recipe with its head drafting from ``most`` tokens; None where nothing has that option."""
    uses = []
    for use in recipe:
        limited = any(o.name == "vocab" for o in catalog.get(use.id).options)
        uses.append(Use.of(use.id, **{**dict(use.options), "vocab": most}) if limited else use)
    changed = replace(recipe, uses=tuple(uses))
    return changed if changed != recipe else None
