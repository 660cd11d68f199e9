"""What a technique asks of dtype, numerics class and machine, as conflicts of the plan."""

from __future__ import annotations

from workbench.kernels.cpu import compiler
from workbench.spec.plan import Conflict
from workbench.spec.technique import TechniqueSpec


def machine_conflicts(spec: TechniqueSpec, dtype: str, numerics: str) -> list[Conflict]:
    """Every condition of a technique that the settings or this machine do not meet."""
    out = []
    for name, value, allowed in (("dtype", dtype, spec.dtypes), ("numerics", numerics, spec.numerics)):
        if allowed and value not in allowed:
            remedy = (
                f"{spec.title} works with {name} {' or '.join(allowed)} only: choose that, or switch it off."
            )
            out.append(Conflict(spec.id, "engine", name, remedy))
    if spec.compiler and not compiler.supported():
        out.append(Conflict(spec.id, "device", "system", f"{spec.title} is built on 64-bit Linux only."))
    elif spec.compiler and compiler.find() is None:
        why = compiler.none_found()
        out.append(Conflict(spec.id, "install", "compiler", f"{why.message} {why.hint}"))
    return out
