"""What a Gluon kernel calls, on the CPU: ``gl``, ``tma``, ``mbarrier`` and the warpgroup products."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workbench.kernels.emulator.errors import EmulatorError
from workbench.kernels.emulator.machine import Machine, Partition
from workbench.kernels.emulator.memory import Barrier, Descriptor, Pointer, Shared, allocate, poison
from workbench.kernels.emulator.values import Int, Tile, raw, torch_dtype


def name_shared(variables: Mapping[str, Any]) -> None:
    """Allocations are called what the kernel calls them."""
    for name, value in variables.items():
        if isinstance(value, Shared) and value.root is value:
            value.name = name


class Gl:
    """``gluon.language``: computes on tiles; layouts and dtypes are the real ones."""

    static_range = range

    def __init__(self, machine: Machine, block: int, blocks: int) -> None:
        self._machine, self._block, self._blocks = machine, block, blocks
        self._shared: list[Shared] = []

    def __getattr__(self, name: str) -> Any:
        from triton.experimental.gluon import language as real

        found = getattr(real, name)
        if callable(found) and not isinstance(found, type):
            raise EmulatorError(f"gl.{name} is not emulated.", hint="Add it to kernels/emulator/language.py.")
        return found

    def program_id(self, axis: int) -> int:
        """Number of this block."""
        return Int(self._block)

    def num_programs(self, axis: int) -> int:
        """Blocks of the grid."""
        return Int(self._blocks)

    def cdiv(self, a: int, b: int) -> int:
        """Division that rounds up."""
        return (a + b - 1) // b

    def arange(self, start: int, end: int, layout: Any = None) -> Tile:
        """int32 [end - start]."""
        return Tile(torch.arange(start, end, dtype=torch.int32))

    def full(self, shape: Sequence[int], value: Any, dtype: Any, layout: Any = None) -> Tile:
        """A constant tile."""
        return Tile(torch.full(list(shape), value, dtype=torch_dtype(dtype)))

    def zeros(self, shape: Sequence[int], dtype: Any, layout: Any = None) -> Tile:
        """A tile of zeros."""
        return self.full(shape, 0, dtype)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = 0) -> Any:
        """Read global memory."""
        return pointer.load(mask, other)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        """Write global memory."""
        pointer.store(value, mask)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        """Elementwise choice; of two numbers, a number."""
        if not isinstance(condition, Tile):
            return a if condition else b
        kind = next((x.data.dtype for x in (a, b) if isinstance(x, Tile)), torch.float32)
        first, second = (torch.as_tensor(raw(x), dtype=kind) for x in (a, b))
        return Tile(torch.where(condition.data, first, second))

    def maximum(self, a: Any, b: Any) -> Any:
        """The larger one; NaN loses."""
        return self._extreme(a, b, torch.fmax, max)

    def minimum(self, a: Any, b: Any) -> Any:
        """The smaller one; NaN loses."""
        return self._extreme(a, b, torch.fmin, min)

    def _extreme(self, a: Any, b: Any, tiles: Any, numbers: Any) -> Any:
        if not isinstance(a, Tile) and not isinstance(b, Tile):
            return numbers(a, b)
        kind = next(x.data.dtype for x in (a, b) if isinstance(x, Tile))
        return Tile(tiles(*(torch.as_tensor(raw(x), dtype=kind) for x in (a, b))))

    def max(self, x: Tile, axis: int) -> Tile:
        """Largest along an axis; NaN loses."""
        return Tile(x.data.masked_fill(x.data.isnan(), float("-inf")).amax(axis))

    def sum(self, x: Tile, axis: int) -> Tile:
        """Sum along an axis in the tile's dtype."""
        return Tile(x.data.sum(axis))

    def exp2(self, x: Tile) -> Tile:
        """2^x."""
        self._machine.note("exp2", number=x.data.numel())
        return Tile(torch.exp2(x.data))

    def log2(self, x: Tile) -> Tile:
        """Binary logarithm."""
        return Tile(torch.log2(x.data))

    def convert_layout(self, x: Tile, layout: Any, assert_trivial: bool = False) -> Tile:
        """Layouts are not modelled: the tile itself."""
        return x

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
        """Fresh shared memory, poisoned."""
        found = allocate(self._machine, dtype, shape, layout)
        self._shared.append(found)
        return found

    def warp_specialize(
        self, parts: Any, warps: Sequence[int], registers: Sequence[int] | None = None
    ) -> None:
        """Run every partition; their first failure is raised here."""
        name_shared(sys._getframe(1).f_locals)
        names = [f"partition {i} ({function.__name__})" for i, (function, _) in enumerate(parts)]
        self._machine.run(
            [
                Partition(name, lambda f=function, a=arguments: f(*a))  # type: ignore[misc]
                for name, (function, arguments) in zip(names, parts, strict=True)
            ]
        )


class Mbarrier:
    """``hopper.mbarrier``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._barriers: dict[tuple[int, int], Barrier] = {}

    def MBarrierLayout(self) -> None:
        """Layouts are not modelled."""

    def _of(self, where: Shared) -> Barrier:
        barrier = self._barriers.get((id(where.root), where.slot))
        if barrier is None:
            raise EmulatorError(f"{where.root.name}[{where.slot}] is used before mbarrier.init.")
        barrier.name = f"{where.root.name}[{where.slot}]"
        return barrier

    def init(self, where: Shared, count: int) -> None:
        """A fresh barrier."""
        name_shared(sys._getframe(1).f_locals)
        self._barriers[id(where.root), where.slot] = Barrier(count, "barrier")

    def expect(self, where: Shared, size: int, pred: bool = True) -> None:
        """Arrive once and announce bytes."""
        self._machine.point()
        if pred:
            self._of(where).arrive(1, size)

    def arrive(self, where: Shared, *, count: int = 1, pred: bool = True) -> None:
        """Arrive ``count`` times."""
        self._machine.point()
        if pred:
            barrier = self._of(where)
            barrier.arrive(count)
            self._machine.note("arrives", barrier.name)

    def wait(self, where: Shared, phase: int, pred: bool = True, deps: Sequence[Any] = ()) -> None:
        """Wait until the phase of that parity is over."""
        if pred:
            barrier = self._of(where)
            name = barrier.name
            self._machine.note("waits", name)
            self._machine.wait_until(
                lambda: barrier.passed(phase), f"{name} to complete the phase of parity {int(phase)}"
            )
            self._machine.note("passes", name)


class Tma:
    """``hopper.tma``: copies that take their time."""

    def __init__(self, machine: Machine, barriers: Mbarrier) -> None:
        self._machine, self._barriers = machine, barriers

    def async_copy_global_to_shared(
        self,
        descriptor: Descriptor,
        corner: Sequence[int],
        barrier: Shared,
        result: Shared,
        pred: bool = True,
    ) -> None:
        """Poison the target now, fill it later, then count the bytes at the barrier."""
        self._machine.point()
        if not pred:
            return
        at, target = self._barriers._of(barrier), result.data
        name, me = f"{result.root.name}[{result.slot}]", self._machine.current
        poison(target)
        self._machine.note("copies", name)

        def land() -> None:
            descriptor.read(corner, target)
            at.landed(descriptor.nbytes)
            self._machine.note("landed", name, by=me)

        self._machine.copy(land)

    def async_copy_shared_to_global(self, descriptor: Descriptor, corner: Sequence[int], src: Shared) -> None:
        """Read shared memory later, and write it out."""
        self._machine.point()
        who = self._machine.current.name
        self._machine.store(lambda: descriptor.write(corner, src.asynchronous_read(who)))

    async_load = async_copy_global_to_shared
    async_store = async_copy_shared_to_global

    def store_wait(self, pendings: int) -> None:
        """Wait until at most ``pendings`` stores have yet to read."""
        self._machine.point()
        self._machine.drain_stores(pendings)


class Product:
    """An accumulator in flight, the ``number``-th of its partition; ``result`` is there once it retired."""

    def __init__(self, shape: Sequence[int], number: int) -> None:
        self.shape, self.number = list(shape), number
        self.result: Tile | None = None

    def read(self, retired: int) -> Tile:
        """The result if it is among the first ``retired``; else NaN, though it may be there by luck."""
        if self.result is None or self.number > retired:
            return Tile(torch.full(self.shape, float("nan")))
        return self.result


class Warpgroup:
    """``warpgroup_mma``, its wait, and the proxy fence."""

    def __init__(self, machine: Machine, gl: Gl) -> None:
        self._machine, self._gl = machine, gl

    def mma(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False, **_: Any
    ) -> Any:
        """acc = a b (+ acc), operands in shared memory read when the product retires."""
        self._machine.point()
        me = self._machine.current
        product, who = Product([a.shape[0], b.shape[1]], me.issued + 1), me.name

        def operand(x: Any) -> torch.Tensor:
            return (x.asynchronous_read(who) if isinstance(x, Shared) else raw(x)).float()

        def retire() -> None:
            total = operand(a) @ operand(b)
            start = acc.read(product.number - 1) if isinstance(acc, Product) else acc
            product.result = Tile(total + start.data if use_acc else total)

        self._machine.product(retire, f"{b.root.name}[{b.slot}]")
        return product if is_async else self.wait(0, [product])

    def wait(self, num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
        """Retire all but the last ``num_outstanding`` products; the values of ``deps``."""
        self._machine.point()
        self._machine.retire(num_outstanding)
        sure = self._machine.current.issued - num_outstanding
        values = tuple(d.read(sure) if isinstance(d, Product) else d for d in deps)
        return values[0] if len(values) == 1 else values

    def fence(self) -> None:
        """Order this partition's ordinary writes before later asynchronous reads."""
        self._machine.point()
        for shared in self._gl._shared:
            shared.fence(self._machine.current.name)
