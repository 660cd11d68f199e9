"""Kernel tests run on a GPU where there is one, and in triton's repaired CPU interpreter elsewhere.

The variable must stand before a kernel file is imported, because the decorator reads it. Ahead-of-time
compiles run in processes of their own, without it. Without triton every file here is skipped, with reason.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_GPU = torch.cuda.is_available()

if HAS_TRITON and not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    from workbench.kernels import interpreter

    interpreter.repair()


class _WithoutTriton(pytest.Module):
    def collect(self) -> Iterator[Any]:
        pytest.skip("needs triton (pip install 'inference-workbench[gpu]')", allow_module_level=True)
        yield


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> pytest.Module | None:
    """Skip what cannot even be imported here."""
    return None if HAS_TRITON else _WithoutTriton.from_parent(parent, path=module_path)


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run in these tests: ``"cuda"``, or ``"cpu"`` for the interpreter."""
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """A fresh seed per test, reported when the test fails: draw inputs with it, on the CPU."""
    seed = int.from_bytes(os.urandom(4), "little")
    request.node.add_report_section("setup", "seed", f"generator seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def mutant() -> Callable[..., FunctionType]:
    """``mutant(jitted, (old, new), …)``: a kernel function with its source edited."""

    def edited(jitted: Any, *edits: tuple[str, str]) -> FunctionType:
        source = textwrap.dedent(inspect.getsource(jitted.fn))
        source = source[source.index("def ") :]
        for old, new in edits:
            assert old in source, f"{old!r} is no longer in {jitted.fn.__name__}: the mutant is stale"
            source = source.replace(old, new)
        space = dict(jitted.fn.__globals__)
        exec(compile(source, f"<mutant of {jitted.fn.__name__}>", "exec"), space)  # noqa: S102
        made = space[jitted.fn.__name__]
        assert isinstance(made, FunctionType)
        return made

    return edited
