"""A machine without a GPU that behaves like one up to the launch: run as a script by the tests.

Tensors compute on the CPU but say that they lie on ``cuda:0``, and an operation that mixes them with CPU
tensors is refused as CUDA would refuse it. Triton is given a driver that names a Hopper target. So a case
of the GPU check can be made, its references worked out, and every kernel it would launch be compiled for
sm_90a, with the very arguments and specialisations of the launch. Prints one JSON line per named case.
"""

from __future__ import annotations

import copy
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from workbench.kernels.bench import roster
from workbench.kernels.bench.case import Case, Lab
from workbench.kernels.bench.launches import compile_only

GPU = torch.device("cuda", 0)
SMEM = 232_448
# Indices, scalars and shapes may lie on the CPU; asking for the CPU leaves the GPU.
MAY_MIX = ("__getitem__", "__setitem__", "copy_", "to", "cpu", "index_put_", "__get__", "__set__", "view_as")


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on the GPU."""

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in MAY_MIX and any(stray(t) for t in tensors((args, kwargs))):
            raise RuntimeError(f"Expected all tensors to be on the same device: {name}")
        if name == "__getitem__" and stray(args[0]) and any(isinstance(t, OnGpu) for t in tensors(args[1:])):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
        return super().__torch_function__(func, types, args, kwargs or {})

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        return move(self, args, kwargs)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()


def stray(x: torch.Tensor) -> bool:
    return not isinstance(x, OnGpu) and x.ndim > 0


def tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def move(x: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
    """``x.to(...)`` where a device may be named."""
    named = [a for a in (*args, kwargs.get("device")) if isinstance(a, str | torch.device)]
    args = [a for a in args if not isinstance(a, str | torch.device)]
    kwargs = {k: v for k, v in kwargs.items() if k != "device"}
    target = torch.device(named[0]).type if named else x.device.type
    out = x.as_subclass(torch.Tensor)
    out = out.to(*args, **kwargs) if args or kwargs else out
    return out.as_subclass(OnGpu) if target == "cuda" else out


class Factories(TorchFunctionMode):
    """``device="cuda"`` makes tensors that say so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__name__", "") == "to" and args and isinstance(args[0], torch.Tensor):
            return move(args[0], args[1:], kwargs)
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        kwargs["device"] = "cpu"
        return func(*args, **kwargs).as_subclass(OnGpu)


class Driver:
    """As much of triton's driver as compiling asks for."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)


def pretend() -> None:
    """From here on there seems to be a Hopper GPU."""
    driver.set_active(Driver())
    facts = SimpleNamespace(
        multi_processor_count=132, major=9, minor=0, L2_cache_size=50 * 2**20, name="Hopper"
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_properties = lambda device=None: facts
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_name = lambda device=None: "Hopper"
    Lab.random = property(lambda self: torch.default_generator)  # type: ignore[assignment]


def tried(case: Case) -> dict[str, Any]:
    """Make the case, its references, and compile what it and its variants launch."""
    lab = Lab(torch.device("cuda"), 7)
    trial = case.make(lab, **case.sizes)
    misplaced = [] if case.timed else [
        f"{of}: {name}"
        for of, found in (("exact", trial.exact()), ("plain", trial.plain()))
        for name, x in found.items()
        if not isinstance(x, OnGpu)
    ]  # fmt: skip
    copy.deepcopy(trial.arguments)
    compiled: list[Any] = []
    with compile_only() as seen, kept(compiled):
        for options in ({}, *case.variants.values()):
            trial.call(**trial.arguments, **options)
    too_large = [k.metadata.name for k in compiled if k.metadata.shared > SMEM]
    return {"launches": len(seen.made), "misplaced": misplaced, "too_large": too_large}


class kept:
    """Collects what ``JITFunction.run`` returns: compiled kernels."""

    def __init__(self, into: list[Any]) -> None:
        self.into = into

    def __enter__(self) -> None:
        from triton.runtime.jit import JITFunction

        self.run: Callable[..., Any] = JITFunction.run

        def run(function: Any, *args: Any, **kwargs: Any) -> Any:
            found = self.run(function, *args, **kwargs)
            self.into.append(found)
            return found

        JITFunction.run = run

    def __exit__(self, *_: object) -> None:
        from triton.runtime.jit import JITFunction

        JITFunction.run = self.run


def main(keys: list[str]) -> None:
    pretend()
    with Factories():
        for case in roster.chosen(keys):
            try:
                found = {"case": case.key, **tried(case)}
            except Exception as error:
                traceback.print_exc()
                found = {"case": case.key, "error": f"{type(error).__name__}: {error}"}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
