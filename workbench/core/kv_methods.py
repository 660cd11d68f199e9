"""Methods that protocol P1 measures, from text: KV formats of the catalogue, and codecs for storage.

``kivi:bits=2``, ``kvtc:ratio=16``, ``cachegen:delta=true``; with ``+`` between two, the second codes what the
first gives back. Text is checked at once; what a method needs of the model (scales, bases, tables) is
calibrated, or read from disk, when it is prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from workbench.core import catalog
from workbench.core.build import standalone_engine
from workbench.core.build_kv import kv_codec
from workbench.core.kv_groups import kv_selector
from workbench.core.kv_prepared import Clock, Prepared, then, timed_format
from workbench.core.kv_storage_methods import STORAGE, Bench, Later
from workbench.kv.cached import RoundTrip
from workbench.models.progress import check_cancel
from workbench.spec.errors import RecipeError
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe, Use

Method = Recipe | RoundTrip | Prepared | Later
FORMAT, SELECTOR = "kv_codec", "kv_selector"  # seams whose techniques are KV methods


def method(text: str) -> Recipe:
    """A method from text, every id and option checked.

    Raises :class:`RecipeError` for what cannot be read or is no KV method, :class:`UnknownTechnique` and
    :class:`OptionError`.
    """
    parts = [text] if text.lstrip().startswith("{") else text.split("+")
    return checked(Recipe.of(*parts))


def checked(recipe: Recipe) -> Recipe:
    """``recipe`` itself, once every use of it can be measured; raises as :func:`method`."""
    kinds = []
    for use in recipe:
        if use.id in STORAGE:
            STORAGE[use.id].configure(use.id, dict(use.options))
            kinds.append("storage")
            continue
        spec = catalog.get(use.id).spec
        catalog.get(use.id).configure(dict(use.options))
        if spec.seam in (FORMAT, SELECTOR):
            kinds.append("format" if spec.seam == FORMAT else "selector")
        elif spec.seam != "pages":
            raise RecipeError(
                f"{use.id} does nothing to what is cached, so it is no KV method.",
                hint="Measure it with --use; KV methods are " + ", ".join((*STORAGE, *named())) + ".",
            )
    stored = kinds.count("storage")
    if not kinds or stored > 1 or (stored and ("selector" in kinds or kinds[-1] != "storage")):
        raise RecipeError(
            f"{str(recipe)!r} is no method: format and selection, or a codec for storage (behind a format).",
            hint="For example kivi:bits=2, kvtc:ratio=16, kv_fp8+kvtc:ratio=16, or snapkv+kv_fp8.",
        )
    return recipe


def planned(recipe: Recipe) -> Recipe:
    """What of a method an engine would plan, with pages where they are needed."""
    rest = recipe.without(*STORAGE)
    needed = any("paged" in catalog.get(u.id).spec.needs for u in rest)
    return rest.with_("paged") if needed and "paged" not in rest else rest


def named(*seams: str) -> tuple[str, ...]:
    """Ids of the catalogue's KV formats and selectors, or of the techniques on these seams."""
    return tuple(i for i in catalog.MODULES if catalog.get(i).spec.seam in (seams or (FORMAT, SELECTOR)))


def grid(ids: Sequence[str] = ()) -> tuple[Recipe, ...]:
    """Every point of every method's curve, as techniques declare them; ``ids`` names the methods wanted.

    Raises :class:`RecipeError` for an id that is no method.
    """
    curves = {i: catalog.get(i).spec.sweep for i in named() if i not in STORAGE}
    curves |= {i: s.sweep for i, s in STORAGE.items()}
    for i in ids:
        if i not in curves:
            raise RecipeError(f"{i!r} is no KV method.", hint=f"Methods are {', '.join(curves)}.")
    return tuple(
        method(f"{i}:{options}") for i, texts in curves.items() if not ids or i in ids for options in texts
    )


def prepare(
    methods: Mapping[str, Method], bench: Bench, plan_of: Callable[[Recipe], Plan]
) -> dict[str, Prepared]:
    """Every method ready to be measured; ``plan_of`` plans the recipe of a KV format.

    Raises what calibrations raise, and ``Cancelled``.
    """
    wanted: dict[str, list[Use]] = {i: [] for i in STORAGE}
    for made in methods.values():
        for use in made if isinstance(made, Recipe) else ():
            if use.id in wanted and use not in wanted[use.id]:
                wanted[use.id].append(use)
    stored: dict[Use, Prepared] = {}
    for i, uses in wanted.items():
        if uses:
            configs = [STORAGE[i].configure(i, dict(u.options)) for u in uses]
            stored |= dict(zip(uses, STORAGE[i].prepare(bench, configs), strict=True))
    out: dict[str, Prepared] = {}
    for name, made in methods.items():
        check_cancel(bench.cancel, "Preparing the methods")
        if isinstance(made, Recipe):
            out[name] = _of(made, bench, plan_of, stored)
        elif isinstance(made, Later):
            out[name] = made.make(bench)
        else:
            out[name] = made if isinstance(made, Prepared) else Prepared(made)
    return out


def _of(
    recipe: Recipe, bench: Bench, plan_of: Callable[[Recipe], Plan], stored: Mapping[Use, Prepared]
) -> Prepared:
    storage = [stored[u] for u in recipe if u.id in STORAGE]
    rest = planned(recipe)
    if storage and not any(u.id in named() for u in rest):
        return storage[0]
    plan = plan_of(rest)
    codec = kv_codec(plan, bench.decoder, bench.progress, bench.cancel)
    selector = kv_selector(plan, bench.decoder.config)
    if selector is not None:
        key = f"{selector.key}/{codec.key}/page{plan.page_size}/engine"
        return Prepared(None, key, codec.nbytes, engine=lambda: standalone_engine(plan, bench.decoder))
    format = timed_format(codec, plan.page_size, Clock())
    return then(format, storage[0]) if storage else format
