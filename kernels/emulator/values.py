"""Numbers and tiles of an emulated kernel: 32-bit integers with C division, and torch tensors.

A tile computes in the dtype it has, as the device does; only casts round. FP8 casts saturate, as
``cvt.rn.satfinite`` does. Maxima ignore NaN, as ``max.f32`` does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.kernels.emulator.errors import EmulatorError

_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "int1": torch.bool,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """Torch's dtype for one of gluon's; raises ``EmulatorError`` for one that is not emulated."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if str(dtype) not in _DTYPES:
        raise EmulatorError(f"The dtype {dtype} is not emulated.", hint=f"Emulated: {', '.join(_DTYPES)}.")
    return _DTYPES[str(dtype)]


def gluon_dtype(dtype: torch.dtype) -> Any:
    """Gluon's dtype for one of torch's."""
    from triton.experimental.gluon import language

    names = {
        "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64",
        "fp8e4nv": "float8e4nv", "fp8e5": "float8e5",
    }  # fmt: skip
    found = next(name for name, known in _DTYPES.items() if known == dtype)
    return getattr(language, names.get(found, found))


class Int(int):
    """A 32-bit scalar: division truncates towards zero, overflow is an error rather than a wrap."""

    def to(self, dtype: Any) -> int | float:
        """Leave the 32-bit range (int64), or become a float."""
        return float(self) if torch_dtype(dtype).is_floating_point else int(self)


def _truncated(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "floordiv": _truncated,
    "mod": lambda a, b: a - b * _truncated(a, b),
}


def _int_method(name: str, swapped: bool) -> Callable[[Int, Any], Any]:
    function = _INTEGER[name]

    def method(self: Int, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        a, b = (int(other), int(self)) if swapped else (int(self), int(other))
        value = function(a, b)
        if not -(2**31) <= value < 2**31:
            raise EmulatorError(f"32-bit overflow: {a} {name} {b}.", hint="Widen with .to(gl.int64).")
        return Int(value)

    return method


for _name in _INTEGER:
    setattr(Int, f"__{_name}__", _int_method(_name, swapped=False))
    setattr(Int, f"__r{_name}__", _int_method(_name, swapped=True))


class Tile:
    """A tensor in registers."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def shape(self) -> list[int]:
        """Shape of the tile."""
        return list(self.data.shape)

    @property
    def dtype(self) -> Any:
        """Element type, as gluon names it."""
        return gluon_dtype(self.data.dtype)

    def to(self, dtype: Any, bitcast: bool = False) -> Tile:
        """A cast that rounds to nearest even and saturates in FP8, or a reinterpretation of the bits."""
        kind = torch_dtype(dtype)
        if bitcast:
            return Tile(self.data.view(kind))
        if kind.itemsize == 1 and kind.is_floating_point:
            top = torch.finfo(kind).max
            return Tile(self.data.float().clamp(-top, top).to(kind))
        return Tile(self.data.to(kind))

    def reshape(self, shape: Sequence[int]) -> Tile:
        """The same elements in another shape."""
        return Tile(self.data.reshape(list(shape)))

    def permute(self, order: Sequence[int]) -> Tile:
        """Axes in another order."""
        return Tile(self.data.permute(*order))

    def __getitem__(self, key: Any) -> Tile:
        """New axes of size one, the only indexing that gluon has."""
        return Tile(self.data[key])


def raw(x: Any) -> Any:
    """What torch computes with: the tensor of a tile, a number as it is."""
    return x.data if isinstance(x, Tile) else x


def _tile_method(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Tile, Any], Tile]:
    def method(self: Tile, other: Any) -> Tile:
        a, b = raw(self), raw(other)
        if isinstance(b, int) and not isinstance(b, bool):
            b = int(b)
        return Tile(function(b, a) if swapped else function(a, b))

    return method


for _name in ("add", "sub", "mul", "truediv", "and", "or", "xor"):
    _function = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    setattr(Tile, f"__{_name}__", _tile_method(_function, swapped=False))
    setattr(Tile, f"__r{_name}__", _tile_method(_function, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tile, f"__{_name}__", _tile_method(getattr(operator, _name), swapped=False))
