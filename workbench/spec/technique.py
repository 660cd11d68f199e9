"""What a technique says about itself: data only, checked to be data.

A technique's module holds, in this order, a frozen ``Config`` dataclass whose fields are
made with :func:`option`, a ``SPEC`` (:class:`TechniqueSpec`), the algorithm as pure
functions, and ``bind`` which plugs it into its seam. Panel, CLI, README table,
compatibility matrix and contract tests are derived from ``Config`` and ``SPEC``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

from workbench.spec.errors import OptionError

Kind = Literal["exact", "lossy", "simulated"]
Seam = Literal[
    "pages",
    "prefix",
    "kv_codec",
    "kv_selector",
    "kv_storage",
    "attention",
    "drafter",
    "verify",
    "control",
    "placement",
    "weights",
    "router",
    "dispatch",
    "layer_policy",
    "logits_mask",
    "scheduler",
    "kernels",
]
Scalar = bool | int | float | str


@dataclass(frozen=True)
class Claim:
    """What a source says, under which conditions; shown as *claimed*, never as measured."""

    text: str
    conditions: str
    source: str


@dataclass(frozen=True)
class TechniqueSpec:
    """One technique as pure data.

    ``claims_slot``: exclusive resources it occupies; two techniques on one slot conflict.
    ``needs``: capabilities that the plan (engine, other techniques, model, device) must provide.
    ``provides``: capabilities it adds for others.
    ``conflicts``: ids it cannot share a plan with, each with one sentence of remedy.
    ``trained``: a drafter with a head that must be trained for the very weights it drafts for.
    ``keeps_kv``: a drafter with KV layers of its own in the engine's pages; bound, it says how many.
    ``sweep``: its points on a rate-distortion curve, each as options ``k=v,k=v`` ("": the defaults).
    ``method_only``: options of the measured method of this name that a recipe lacks, and what says it there.
    ``dtypes``, ``numerics``: the only ones it works in (empty: all).
    ``compiler``: it compiles C++ on the machine that runs it.
    ``extra``: the optional dependency group it needs (``""`` for none) and ``package`` its import name.
    """

    id: str
    title: str
    family: str
    seam: Seam
    kind: Kind
    summary: str
    paper: str
    stages: tuple[str, ...] = ()
    claims_slot: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    conflicts: Mapping[str, str] = field(default_factory=dict)
    backends: tuple[str, ...] = ("cpu", "cuda")
    claims: tuple[Claim, ...] = ()
    keeps_kv: bool = False
    trained: bool = False
    dtypes: tuple[str, ...] = ()
    numerics: tuple[str, ...] = ()
    compiler: bool = False
    sweep: tuple[str, ...] = ("",)
    method_only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    extra: str = ""
    package: str = ""


def option(
    default: Scalar,
    *,
    help: str,
    unit: str = "",
    choices: tuple[Scalar, ...] = (),
    low: float | None = None,
    high: float | None = None,
    step: float | None = None,
) -> Any:
    """A config field with the range, unit and help that controls and flags are made from."""
    meta = {"help": help, "unit": unit, "choices": choices, "low": low, "high": high, "step": step}
    return field(default=default, metadata={"option": meta})


@dataclass(frozen=True)
class Option:
    """One option of a technique, as its controls, CLI flags and docs see it."""

    name: str
    type: type
    default: Scalar
    help: str
    unit: str = ""
    choices: tuple[Scalar, ...] = ()
    low: float | None = None
    high: float | None = None
    step: float | None = None

    def check(self, value: object, owner: str) -> Scalar:
        """Return ``value`` in the option's type, or raise :class:`OptionError` naming the way out."""
        where = f"{owner}.{self.name}"
        if self.type is bool and not isinstance(value, bool):
            raise OptionError(f"{where} = {value!r} is not true or false.")
        if self.type in (int, float):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise OptionError(f"{where} = {value!r} is not a number.", hint=self.allowed())
            if not math.isfinite(value):
                raise OptionError(f"{where} = {value!r} is not finite.", hint=self.allowed())
            if self.type is int and value != int(value):
                raise OptionError(f"{where} = {value!r} is not a whole number.", hint=self.allowed())
            value = self.type(value)
        if self.type is str and not isinstance(value, str):
            raise OptionError(f"{where} = {value!r} is not text.", hint=self.allowed())
        out: Scalar = value  # type: ignore[assignment]
        if self.choices and out not in self.choices:
            raise OptionError(f"{where} = {value!r} is not one of its choices.", hint=self.allowed())
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        if not isinstance(out, bool | str) and not low <= out <= high:
            raise OptionError(f"{where} = {value!r} is out of range.", hint=self.allowed())
        return out

    def allowed(self) -> str:
        """One sentence saying which values are accepted."""
        unit = f" {self.unit}" if self.unit else ""
        if self.choices:
            return f"Choose one of {', '.join(map(str, self.choices))}{unit}."
        if self.low is not None and self.high is not None:
            return f"Choose a value from {self.low:g} to {self.high:g}{unit}."
        if self.low is not None:
            return f"Choose a value of at least {self.low:g}{unit}."
        return f"It takes {self.type.__name__} values."


def options_of(config: type) -> tuple[Option, ...]:
    """The options of a config dataclass, in field order."""
    hints = get_type_hints(config)
    out = []
    for f in dataclasses.fields(config):
        meta = f.metadata.get("option")
        if meta is None:
            raise OptionError(f"{config.__name__}.{f.name} carries no option() metadata.")
        out.append(Option(name=f.name, type=hints[f.name], default=f.default, **meta))  # type: ignore[arg-type]
    return tuple(out)


def make_config(config: type, values: Mapping[str, object], owner: str) -> Any:
    """Build ``config`` from untrusted ``values``; unknown names and bad values raise :class:`OptionError`."""
    known = {o.name: o for o in options_of(config)}
    for name in values:
        if name not in known:
            names = ", ".join(known) or "none"
            raise OptionError(f"{owner} has no option {name!r}.", hint=f"Its options: {names}.")
    return config(**{name: known[name].check(v, owner) for name, v in values.items()})
