"""The catalogue: one line per technique, imported only when it is asked for.

Adding a technique is its file and one line here. Panel, CLI, README table, compatibility matrix and
contract tests are derived from what this module returns.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from workbench.spec.errors import OptionError, RecipeError, UnknownTechnique
from workbench.spec.install import install_line
from workbench.spec.recipe import Recipe, Use
from workbench.spec.technique import Option, Scalar, TechniqueSpec, make_config, options_of

MODULES: dict[str, str] = {
    "paged": "workbench.engine.techniques.paged",
    "prefix_cache": "workbench.engine.techniques.prefix_cache",
    "radix_cache": "workbench.engine.techniques.radix_cache",
    "chunked_prefill": "workbench.engine.techniques.chunked_prefill",
    "compiled": "workbench.engine.techniques.compiled",
    "reference": "workbench.attention.reference",
    "sdpa": "workbench.attention.sdpa",
    "triton": "workbench.attention.triton",
    "quest": "workbench.attention.quest",
    "kv_fp8": "workbench.kv.kv_fp8",
    "kv_int8": "workbench.kv.kv_int8",
    "kv_fp4": "workbench.kv.kv_fp4",
    "kivi": "workbench.kv.kivi",
    "xquant": "workbench.kv.xquant",
    "streaming_llm": "workbench.kv.streaming_llm",
    "snapkv": "workbench.kv.snapkv",
    "h2o": "workbench.kv.h2o",
    "expected_attention": "workbench.kv.expected_attention",
    "knorm": "workbench.kv.knorm",
    "curdkv": "workbench.kv.curdkv",
    "adacurdkv": "workbench.kv.adacurdkv",
    "kvtc": "workbench.kv.kvtc",
    "cachegen": "workbench.kv.cachegen",
    "ngram": "workbench.speculative.ngram",
    "suffix": "workbench.speculative.suffix",
    "draft_model": "workbench.speculative.draft_model",
    "layerskip": "workbench.speculative.layerskip",
    "medusa": "workbench.speculative.medusa",
    "mtp": "workbench.speculative.mtp",
    "eagle": "workbench.speculative.eagle",
    "eagle3": "workbench.speculative.eagle3",
    "fasteagle": "workbench.speculative.fasteagle",
    "hybrid": "workbench.speculative.hybrid",
    "swiftspec": "workbench.speculative.swiftspec",
    "mirror_sd": "workbench.speculative.mirror_sd",
    "verify": "workbench.speculative.verify",
    "typical": "workbench.speculative.typical",
    "goodput": "workbench.speculative.goodput",
    "lede": "workbench.speculative.lede",
    "fused_round": "workbench.speculative.fused_round",
    "rtn": "workbench.quant.rtn",
}


@dataclass(frozen=True)
class Technique:
    """A technique of the catalogue: its spec, its options, and how it binds to its seam."""

    spec: TechniqueSpec
    config: type
    bind: Callable[[Any, Any], Any]

    @property
    def id(self) -> str:
        """The technique's id."""
        return self.spec.id

    @property
    def options(self) -> tuple[Option, ...]:
        """Its options, in field order."""
        return options_of(self.config)

    @property
    def installed(self) -> bool:
        """False when the optional package it needs is not there."""
        return not self.spec.package or importlib.util.find_spec(self.spec.package) is not None

    @property
    def install_line(self) -> str:
        """The command that brings the optional package, or an empty string."""
        return install_line(self.spec.extra) if self.spec.extra else ""

    def configure(self, options: dict[str, Scalar]) -> Any:
        """Its config from untrusted options; raises :class:`OptionError`."""
        for name, value in options.items():
            if name in self.spec.method_only:
                raise OptionError(
                    f"{self.id} has no option {name!r} in a recipe.",
                    hint=f"{name} is for measuring the method (--method {self.id}:{name}={value}); "
                    f"a recipe has {' and '.join(self.spec.method_only[name])} instead.",
                )
        return make_config(self.config, options, self.id)


@cache
def get(technique_id: str) -> Technique:
    """The technique of that id. Raises :class:`UnknownTechnique` with the ids that come close."""
    module_name = MODULES.get(technique_id)
    if module_name is None:
        close = difflib.get_close_matches(technique_id, MODULES, n=3)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"Known: {', '.join(MODULES)}."
        raise UnknownTechnique(f"There is no technique {technique_id!r}.", hint=hint)
    module = importlib.import_module(module_name)
    return Technique(module.SPEC, module.Config, module.bind)


def all_techniques() -> tuple[Technique, ...]:
    """Every technique, in catalogue order."""
    return tuple(get(i) for i in MODULES)


def normalise(recipe: Recipe) -> Recipe:
    """The recipe with every option checked, in its own type, and left out where it is the default.

    Raises :class:`UnknownTechnique` and :class:`OptionError`; two recipes that mean the same become equal.
    """
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{recipe!r} is no Recipe.", hint='Write Recipe.of("paged", "kivi:bits=2").')
    uses = []
    for use in recipe:
        technique = get(use.id)
        config = technique.configure(dict(use.options))
        kept = {o.name: getattr(config, o.name) for o in technique.options}
        uses.append(
            Use.of(use.id, **{o.name: kept[o.name] for o in technique.options if kept[o.name] != o.default})
        )
    return Recipe(tuple(uses))


def check_options(use: Use) -> str | None:
    """What is wrong with a use's options, in one sentence, or None."""
    try:
        get(use.id).configure(dict(use.options))
    except OptionError as err:
        return str(err)
    return None
