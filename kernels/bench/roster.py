"""All cases of all kernels: one file per kernel in ``cases/``, found by the kernel's name.

Adding a kernel adds one file there; this module, the command, the report and the tests follow. Cases of one
kernel are in the order they run: checks, smallest first, then timed cases.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from workbench.kernels import CATALOGUE
from workbench.kernels.bench.case import Case, Relation
from workbench.spec.errors import MissingExtra, OptionError


def covered() -> list[str]:
    """Kernel files of the catalogue that have cases."""
    return [name for name in CATALOGUE if (Path(__file__).parent / "cases" / f"{name}.py").is_file()]


def uncovered() -> list[str]:
    """Kernel files of the catalogue without cases: neither proven nor measured on a GPU."""
    return [name for name in CATALOGUE if name not in covered()]


def cases_of(kernel: str) -> tuple[Case, ...]:
    """The cases of one kernel file, checks first; empty when it has none."""
    if kernel not in covered():
        return ()
    found: tuple[Case, ...] = _module(kernel).CASES
    return tuple(sorted(found, key=lambda case: case.timed))


def relations_of(kernel: str) -> tuple[Relation, ...]:
    """Relations between cases that the kernel's file states; each names cases of that kernel."""
    return tuple(getattr(_module(kernel), "RELATIONS", ())) if kernel in covered() else ()


def chosen(only: Sequence[str] = ()) -> list[Case]:
    """Cases of the named kernels, or of all; a name may also be a case's key, or the part after the colon.

    Raises ``OptionError`` for a name that is neither, ``MissingExtra`` without triton.
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("triton", "gpu", "workbench gpu-check")
    everything = [case for kernel in covered() for case in cases_of(kernel)]
    if not only:
        return everything
    for name in only:
        if not any(_is_named(case, name) for case in everything):
            raise OptionError(
                f"There is no kernel or case {name!r} to check.",
                hint=f"Kernels: {', '.join(covered())}; their cases: workbench gpu-check --plan.",
            )
    return [case for case in everything if any(_is_named(case, name) for name in only)]


def find(key: str) -> Case:
    """The case of that key; raises ``OptionError`` when there is none."""
    for case in cases_of(key.partition(":")[0]):
        if case.key == key:
            return case
    raise OptionError(f"There is no case {key!r}.", hint="List them: workbench gpu-check --plan.")


def _is_named(case: Case, name: str) -> bool:
    return name in (case.kernel, case.key, case.name)


def _module(kernel: str):  # type: ignore[no-untyped-def]
    return importlib.import_module(f"workbench.kernels.bench.cases.{kernel}")
