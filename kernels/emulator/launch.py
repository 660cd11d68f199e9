"""Launch a Gluon kernel on the CPU: rebind what its functions call, then run block after block.

``swaps`` put other functions in the place of named ones: that is how the tests keep mutants of a kernel
that must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch

from workbench.kernels.emulator.errors import EmulatorError
from workbench.kernels.emulator.language import Gl, Mbarrier, Tma, Warpgroup
from workbench.kernels.emulator.machine import SCHEDULES, Machine, Schedule
from workbench.kernels.emulator.memory import Descriptor, Pointer
from workbench.kernels.emulator.recorder import Recorder
from workbench.kernels.emulator.values import Int

Swaps = Mapping[str, FunctionType]


@dataclass(frozen=True)
class Emulator:
    """A schedule, swapped functions, and a grid size; ``launch`` takes the place of ``kernel[grid](...)``.

    A ``recorder`` collects what happened, in order.
    """

    schedule: Schedule = SCHEDULES[4]
    swaps: Swaps = field(default_factory=dict)
    blocks: int = 2
    recorder: Recorder | None = None

    def launch(self, kernel: Any, blocks: int, arguments: Mapping[str, Any]) -> None:
        """Run ``blocks`` blocks; results are written to the tensors among the arguments.

        Raises ``EmulatorError`` (``Deadlock``, ``Race``) for what the hardware would not forgive.
        """
        used: set[str] = set()
        for block in range(blocks):
            machine = Machine(self.schedule, block, self.recorder)
            binder = _Binder(machine, block, blocks, self.swaps)
            binder.function(kernel)(**{name: _argument(value) for name, value in arguments.items()})
            machine.leave(machine.current)
            used |= binder.swapped
        if missed := set(self.swaps) - used:
            raise EmulatorError(
                f"Swapped functions that the kernel never calls: {', '.join(sorted(missed))}."
            )


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(value)
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    return Int(value) if isinstance(value, int) and not isinstance(value, bool) else value


class _Binder:
    """Copies of functions whose globals lead to the emulated machine."""

    def __init__(self, machine: Machine, block: int, blocks: int, swaps: Swaps) -> None:
        from triton.experimental.gluon import language as real
        from triton.experimental.gluon.language.nvidia import hopper
        from triton.runtime.jit import JITFunction

        gl = Gl(machine, block, blocks)
        barriers = Mbarrier(machine)
        copies = Tma(machine, barriers)
        group = Warpgroup(machine, gl)
        self._known: list[tuple[Any, Any]] = [
            (real, gl),
            (hopper.mbarrier, barriers),
            (hopper.tma, copies),
            (hopper.warpgroup_mma, group.mma),
            (hopper.warpgroup_mma_wait, group.wait),
            (hopper.fence_async_shared, group.fence),
        ]
        # A kernel may hold the copies themselves, under the old or the new name (see `gluon_names`).
        for name in (
            "async_copy_global_to_shared",
            "async_load",
            "async_copy_shared_to_global",
            "async_store",
        ):
            if hasattr(hopper.tma, name):
                self._known.append((getattr(hopper.tma, name), getattr(copies, name)))
        self._swaps = swaps
        self._jitted, self._constexpr = JITFunction, real.constexpr
        self._done: dict[Any, Callable[..., Any]] = {}
        self.swapped: set[str] = set()

    def value(self, found: Any) -> Any:
        """The emulated counterpart of a global."""
        for original, emulated in self._known:
            if found is original:
                return emulated
        if isinstance(found, self._constexpr):
            return found.value
        return self.function(found) if isinstance(found, self._jitted) else found

    def function(self, jitted: Any) -> Callable[..., Any]:
        """A jitted function with its globals rebound."""
        if jitted not in self._done:
            original = self._swaps.get(jitted.fn.__name__, jitted.fn)
            if original is not jitted.fn:
                self.swapped.add(jitted.fn.__name__)
            scope = {"__builtins__": __builtins__}
            copy = FunctionType(
                original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
            )
            self._done[jitted] = copy
            names = original.__globals__
            scope |= {n: self.value(names[n]) for n in _names(original.__code__) if n in names}
        return self._done[jitted]


def _names(code: Any) -> set[str]:
    """Global names that code uses, nested functions and comprehensions included."""
    nested = (c for c in code.co_consts if hasattr(c, "co_names"))
    return set(code.co_names).union(*(_names(c) for c in nested))
