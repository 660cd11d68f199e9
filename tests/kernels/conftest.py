"""Kernel tests run on a GPU where there is one, and in triton's repaired CPU interpreter elsewhere.

The variable must stand before triton or a kernel file is imported, because the decorator reads it. It is set
while these files are collected and while they run, so that other tests see the machine as it is. Compiles
ahead of time run in processes of their own, without it. Without triton every file is skipped, with reason.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
ON_GPU = torch.cuda.is_available()

INTERPRETED = HAS_TRITON and not ON_GPU
VARIABLE = "TRITON_INTERPRET"
BEFORE = os.environ.get(VARIABLE)

if INTERPRETED:
    if "triton" in sys.modules and not BEFORE:
        raise pytest.UsageError(
            "tests/kernels must be collected before tests that import triton: name it first"
        )
    os.environ[VARIABLE] = "1"
    from workbench.kernels import interpreter

    interpreter.repair()


def pytest_collection_finish() -> None:
    """Collected: the other tests' turn."""
    if INTERPRETED and not BEFORE:
        os.environ.pop(VARIABLE, None)


@pytest.fixture(scope="module", autouse=True)
def interpreting() -> Iterator[None]:
    """Kernels are interpreted while a file of this folder runs."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setenv(VARIABLE, "1")
        yield


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


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN (or an absurd number): an output that a kernel forgets to write is noticed."""
    empty = torch.empty
    floats = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def filled(*sizes: Any, **options: Any) -> torch.Tensor:
        fresh = empty(*sizes, **options)
        if fresh.dtype in floats:
            return fresh.fill_(torch.nan)
        if fresh.dtype.is_floating_point:  # FP8, whose NaN is all ones below the sign
            fresh.view(torch.uint8).fill_(0x7F)
            return fresh
        return fresh.fill_(-77) if fresh.dtype in (torch.int32, torch.int64) else fresh

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture
def draw(generator: torch.Generator, device: str) -> Callable[..., torch.Tensor]:
    """Normal numbers of a shape, bfloat16 unless another ``dtype`` is asked."""

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    return drawn
