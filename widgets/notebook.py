"""Parameters of a notebook, checked: right names, right types, values in range.

Papermill runs a notebook whatever it is given: a misspelt parameter becomes an unused variable, and the run
measures something nobody asked for. Papermill's own cell is therefore read back, and a name that the
notebook's parameters cell does not have fails the run.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.models.names import DEFAULT_MODEL, SHIPPED_MODEL
from workbench.models.registry import resolve
from workbench.spec.errors import ModelError, OptionError

_TYPES: dict[str, type] = {"model": str, "device": str, "seed": int, "budget_s": float, "profile": str}
_PROFILES = ("interactive", "bench", "smoke")
_INJECTED = "# Parameters"  # first line of the cell that papermill inserts


@dataclass(frozen=True)
class Parameters:
    """What every notebook takes.

    ``model``: a name of the registry or a folder; empty takes the default model where it has been fetched,
    else the shipped one. ``device``: cpu or cuda. ``seed``: of sampling and prompts. ``budget_s``: seconds
    the slow parts may take. ``profile``: *interactive*; *bench*; *smoke* runs everything once, as short as it
    goes. ``own``: what only this notebook takes, all of it text.
    """

    model: str
    device: str
    seed: int
    budget_s: float
    profile: str
    note: str = ""  # why the model is another one than somebody might expect
    own: Mapping[str, str] = field(default_factory=dict)

    @property
    def smoke(self) -> bool:
        """True when the run should only show that everything works."""
        return self.profile == "smoke"

    @property
    def repeats(self) -> int:
        """Repetitions of an A/B measurement: one in a smoke run, else three to nine, by the budget."""
        return 1 if self.smoke else max(3, min(9, int(self.budget_s // 20)))

    def tokens(self, wanted: int) -> int:
        """Output length: ``wanted``, shorter in a smoke run."""
        return min(wanted, 16) if self.smoke else wanted

    def __str__(self) -> str:
        where = f"model={self.model} device={self.device} seed={self.seed}"
        line = f"{where} budget_s={self.budget_s:g} profile={self.profile}"
        line = " ".join([line, *(f"{name}={value}" for name, value in self.own.items() if value)])
        return f"{line}\n{self.note}" if self.note else line


def parameters(namespace: Mapping[str, Any], own: Iterable[str] = ()) -> Parameters:
    """The parameters in a notebook's ``globals()``; ``own`` names text parameters that only it has.

    Raises :class:`OptionError` for a name that papermill injected and no notebook has, and for a value of the
    wrong type or out of range.
    """
    types = {**_TYPES, **dict.fromkeys(own, str)}
    for name in injected(namespace.get("In", ())):
        if name not in types:
            close = difflib.get_close_matches(name, types, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Parameters: {', '.join(types)}."
            raise OptionError(f"This notebook has no parameter {name!r}.", hint=hint)
    values: dict[str, Any] = {}
    for name, kind in types.items():
        if name not in namespace:
            raise OptionError(f"The parameter {name!r} is not set.", hint="Run the parameters cell first.")
        values[name] = _typed(name, namespace[name], kind)
    if values["profile"] not in _PROFILES:
        raise OptionError(
            f"profile = {values['profile']!r} is unknown.", hint=f"Choose one of {', '.join(_PROFILES)}."
        )
    if values["seed"] < 0 or values["budget_s"] <= 0:
        raise OptionError("seed must be at least 0 and budget_s above 0.")
    if not values["model"]:
        values["model"], values["note"] = _model_here()
    return Parameters(**{n: values.pop(n) for n in (*_TYPES, "note") if n in values}, own=values)


def _model_here() -> tuple[str, str]:
    """The default model where it has been fetched; else the shipped one, and how to get the other."""
    try:
        resolve(DEFAULT_MODEL)
    except ModelError as error:
        return SHIPPED_MODEL, f"{error.message} {error.hint}"
    return DEFAULT_MODEL, ""


def injected(cells: Iterable[str]) -> list[str]:
    """Names assigned by the cells that papermill inserted."""
    names = []
    for source in cells:
        if source.lstrip().startswith(_INJECTED):
            for node in ast.parse(source).body:
                targets = node.targets if isinstance(node, ast.Assign) else []
                names += [t.id for t in targets if isinstance(t, ast.Name)]
    return names


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise OptionError(
            f"{name} = {value!r} is not {'a number' if kind is float else f'of type {kind.__name__}'}."
        )
    return value
