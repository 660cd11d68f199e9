"""Shared memory, barriers, tensor descriptors and pointers of an emulated block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.emulator.errors import EmulatorError, Race
from workbench.kernels.emulator.values import Int, Tile, gluon_dtype, torch_dtype


def poison(x: Tensor) -> None:
    """Fill with NaN (integers: with their lowest value), as if another copy had been there."""
    if x.dtype.itemsize == 1 and x.dtype.is_floating_point:
        x.view(torch.uint8).fill_(0x7F)
    elif x.dtype.is_floating_point:
        x.fill_(float("nan"))
    else:
        x.fill_(torch.iinfo(x.dtype).min)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    )


class Shared:
    """A view of a shared-memory allocation; ``data`` aliases the allocation, ``slot`` is its first index."""

    def __init__(self, machine: Any, data: Tensor, layout: Any, root: Shared | None = None, slot: int = 0):
        self.machine, self.data, self.layout = machine, data, layout
        self.root = root or self
        self.slot = slot
        if root is None:
            self.name = "shared memory"
            self.unfenced: dict[int, set[str]] = {}
            self.agreed: dict[int, set[str]] = {}

    @property
    def dtype(self) -> Any:
        """Element type, as gluon names it."""
        return gluon_dtype(self.data.dtype)

    @property
    def shape(self) -> list[int]:
        """Shape of the view."""
        return list(self.data.shape)

    def _view(self, data: Tensor, slot: int | None = None) -> Shared:
        return Shared(self.machine, data, self.layout, self.root, self.slot if slot is None else slot)

    def index(self, i: int) -> Shared:
        """The ``i``-th entry along the first axis."""
        if not 0 <= i < self.data.shape[0]:
            raise EmulatorError(
                f"{self.root.name}[{i}] of {self.data.shape[0]}.", hint="Check the ring index."
            )
        return self._view(self.data[int(i)], int(i) if self.root is self else None)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """``length`` entries from ``start`` on."""
        return self._view(self.data.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        """Axes in another order."""
        return self._view(self.data.permute(*order))

    def load(self, layout: Any) -> Tile:
        """An ordinary read."""
        self.machine.point()
        return Tile(self.data.clone())

    def store(self, value: Tile) -> None:
        """An ordinary write: invisible to asynchronous readers until fenced.

        Partitions may write equal bits to one place; each is then safe behind a fence of its own.
        """
        self.machine.point()
        new = value.data.to(self.data.dtype)
        if not torch.equal(_bits(new), _bits(self.data)):
            self.root.agreed[self.slot] = set()
            self.data.copy_(new)
        for noted in (self.root.agreed, self.root.unfenced):
            noted.setdefault(self.slot, set()).add(self.machine.current.name)

    def fence(self, who: str) -> None:
        """Make the ordinary writes of one partition visible to asynchronous readers."""
        for writers in self.root.unfenced.values():
            writers.discard(who)

    def asynchronous_read(self, reader: str) -> Tensor:
        """The contents as a copy engine or tensor core sees them; raises ``Race`` on unfenced writes."""
        writers = self.root.unfenced.get(self.slot, set())
        if writers and (reader in writers or reader not in self.root.agreed[self.slot]):
            raise Race(
                f"{reader} reads {self.root.name}[{self.slot}] asynchronously, "
                f"but {', '.join(sorted(writers))} wrote it without a fence.",
                hint="Call fence_async_shared() after the store.",
            )
        return self.data.clone()


class Barrier:
    """An mbarrier: phase, arrivals still missing, bytes still missing."""

    def __init__(self, count: int, name: str) -> None:
        self.count, self.name = count, name
        self.phase = 0
        self.missing = count
        self.bytes = 0

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        """``count`` arrivals that also announce ``expected`` bytes."""
        self.missing -= count
        self.bytes += expected
        if self.missing < 0:
            raise EmulatorError(f"{self.name}: more arrivals than its count of {self.count}.")
        self._flip()

    def landed(self, size: int) -> None:
        """``size`` bytes of a copy have arrived."""
        self.bytes -= size
        self._flip()

    def _flip(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase ^ 1, self.count

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity is over; a fresh barrier counts as past parity 1."""
        return self.phase != parity


class Descriptor:
    """A TMA descriptor: boxes of a strided matrix; out of bounds reads zero, writes are dropped."""

    def __init__(self, host: Any) -> None:
        base = host.base
        self.matrix = torch.as_strided(base, list(host.shape), list(host.strides), base.storage_offset())
        self.box = [int(n) for n in host.block_shape]
        self.layout = host.layout
        self.dtype = gluon_dtype(base.dtype)
        self.nbytes = base.element_size() * int(torch.tensor(self.box).prod())

    @property
    def block_type(self) -> Descriptor:
        """Stands for its own block type: only ``nbytes`` is asked of it."""
        return self

    def _parts(self, corner: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        inside, within = [], []
        for start, size, bound in zip(corner, self.box, self.matrix.shape, strict=True):
            low, high = max(0, int(start)), min(bound, int(start) + size)
            inside.append(slice(low, max(low, high)))
            within.append(slice(low - int(start), max(low, high) - int(start)))
        return tuple(inside), tuple(within)

    def read(self, corner: Sequence[int], target: Tensor) -> None:
        """Fetch the box at ``corner``."""
        inside, within = self._parts(corner)
        raw = target.view(torch.uint8) if target.dtype.itemsize == 1 else target
        source = self.matrix.view(torch.uint8) if raw is not target else self.matrix
        raw.zero_()
        raw[within] = source[inside]

    def write(self, corner: Sequence[int], source: Tensor) -> None:
        """Write the box at ``corner``."""
        inside, within = self._parts(corner)
        self.matrix[inside] = source[within]


class Pointer:
    """A pointer into a tensor's storage, with one offset or a tile of them (in elements)."""

    def __init__(self, base: Tensor, offset: Any = 0) -> None:
        self.base, self.offset = base, offset

    def __add__(self, more: Any) -> Pointer:
        """Advance by a number or a tile of numbers."""
        return Pointer(self.base, self.offset + more)

    def _flat(self) -> Tensor:
        start = self.base.storage_offset()
        size = self.base.untyped_storage().nbytes() // self.base.element_size() - start
        return torch.as_strided(self.base, [size], [1], start)

    def load(self, mask: Tile | None = None, other: float = 0) -> Any:
        """A number, or a tile where the offsets are one; raises ``EmulatorError`` out of bounds."""
        flat = self._flat()
        if not isinstance(self.offset, Tile):
            self._check(torch.tensor(int(self.offset)), flat)
            value = flat[int(self.offset)].item()
            return Int(value) if isinstance(value, int) else value
        where = self.offset.data.long()
        seen = torch.ones_like(where, dtype=torch.bool) if mask is None else mask.data.expand(where.shape)
        self._check(where[seen], flat)
        found = flat[where.masked_fill(~seen, 0)]
        return Tile(torch.where(seen, found, torch.full_like(found, other)))

    def store(self, value: Any, mask: Tile | None = None) -> None:
        """Write where the mask holds; raises ``EmulatorError`` out of bounds."""
        flat, where = self._flat(), self.offset.data.long()
        seen = torch.ones_like(where, dtype=torch.bool) if mask is None else mask.data.expand(where.shape)
        self._check(where[seen], flat)
        flat[where[seen]] = value.data.to(flat.dtype).expand(where.shape)[seen]

    def _check(self, where: Tensor, flat: Tensor) -> None:
        if where.numel() and (int(where.min()) < 0 or int(where.max()) >= flat.numel()):
            raise EmulatorError(
                f"Access to elements {int(where.min())} to {int(where.max())} of {flat.numel()}.",
                hint="Check the mask and the strides.",
            )


def allocate(machine: Any, dtype: Any, shape: Sequence[int], layout: Any) -> Shared:
    """Fresh shared memory, poisoned."""
    data = torch.empty(list(shape), dtype=torch_dtype(dtype))
    poison(data)
    return Shared(machine, data, layout)
