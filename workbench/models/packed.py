"""A linear layer as a closure over packed weights.

Kernels are resolved once, when the weights are packed, so the hot path has no branching and no
schema matching. ``held`` keeps everything the closure needs alive, so that bytes can be counted
from what is really there. Input is in the residual dtype (float32 or float64) or already bfloat16; output
is in the residual dtype, or in bfloat16 where the kernel rounds its sums to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor
from torch.nn import functional as F

LinearFn = Callable[[Tensor], Tensor]
TILE = 8
"""Rows per call in the pinned class: from 8 rows on, GEMM libraries use one kernel per shape."""


@dataclass(frozen=True)
class PackedLinear:
    """``fn(x [M, k]) -> [M, n]``, with the name of its kernel and all it keeps alive.

    ``opaque_nbytes`` counts packed objects in ``held`` that expose no storage. A ``gated`` linear over the
    fused gate and up rows applies the activation and the product itself: its output is [M, n / 2].
    ``native`` describes the weights to compiled layers, which then need not call ``fn``.
    """

    fn: LinearFn
    n: int
    k: int
    kernel: str
    held: tuple[Any, ...]
    opaque_nbytes: int = 0
    gated: bool = False
    native: Any = None
    number: int = field(default_factory=itertools.count().__next__, compare=False, repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to ``x`` [M, k], giving [M, n]. A compiler does not look into it (:func:`opaque`)."""
        return _opaque(x, self.number) if torch.compiler.is_compiling() else self.fn(x)


_OPAQUE: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()
_OUTPUTS: dict[int, tuple[int, torch.dtype]] = {}


def opaque(linear: PackedLinear, dtype: torch.dtype, device: torch.device) -> PackedLinear:
    """The same linear for compiled programs, which call its kernel as it is; ``x`` has this dtype there."""
    out = linear.fn(torch.zeros((1, linear.k), dtype=dtype, device=device))
    _OPAQUE[linear.number], _OUTPUTS[linear.number] = linear, (out.shape[1], out.dtype)
    finalize(linear, _OUTPUTS.pop, linear.number, None)
    return replace(linear, fn=linear, number=linear.number)


def _run_opaque(x: Tensor, number: int) -> Tensor:
    return _OPAQUE[number].fn(x)


_opaque: Callable[[Tensor, int], Tensor] = torch.library.custom_op(
    "workbench::packed_linear", _run_opaque, mutates_args=(), schema="(Tensor x, int number) -> Tensor"
)


def _shape_opaque(x: Tensor, number: int) -> Tensor:
    width, dtype = _OUTPUTS[number]
    return x.new_empty((x.shape[0], width), dtype=dtype)


torch.library.register_fake("workbench::packed_linear", _shape_opaque)


def held_nbytes(linears: Iterable[PackedLinear], tensors: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages of ``tensors`` and everything ``linears`` hold."""
    storages: dict[int, int] = {}
    packed = list(linears)
    for tensor in [*tensors, *(t for p in packed for t in p.held if isinstance(t, Tensor))]:
        if tensor.is_mkldnn:
            storages[id(tensor)] = int(torch.ops.mkldnn._nbytes(tensor))
        else:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    opaque = {id(p): p.opaque_nbytes for p in packed}
    return sum(storages.values()) + sum(opaque.values())


def tiled(fn: LinearFn) -> LinearFn:
    """``fn`` on tiles of exactly 8 rows, the last one padded with zeros.

    The same GEMM shape then runs whatever the number of rows. Tiles are copied when they would not
    start at a 64-byte boundary, because GEMM kernels may peel unaligned elements.
    """

    def run(x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows == TILE and x.data_ptr() % 64 == 0 and x.is_contiguous():
            return fn(x)
        tiles = []
        for tile in torch.split(x, TILE):
            if tile.shape[0] < TILE:
                padded = tile.new_zeros((TILE, tile.shape[1]))
                padded[: tile.shape[0]] = tile
                tile = padded
            elif tile.data_ptr() % 64 or not tile.is_contiguous():
                tile = tile.clone(memory_format=torch.contiguous_format)
            tiles.append(fn(tile))
        return torch.cat(tiles)[:rows]

    return run


def dense(weight: Tensor, bias: Tensor | None, *, pinned: bool) -> PackedLinear:
    """``F.linear`` on a dense weight [n, k] in the residual dtype.

    Shares the weight's storage, except in the pinned class when k is not a multiple of 16: rows of
    a tile would then be aligned differently and take different code, so zeros are appended to both.
    """
    extra = -weight.shape[1] % 16 if pinned else 0
    held = F.pad(weight, (0, extra)) if extra else weight

    def fn(x: Tensor) -> Tensor:
        return F.linear(F.pad(x, (0, extra)) if extra else x, held, bias)

    name = f"F.linear {_short(weight.dtype)}"
    return _linear(fn, weight, name, (held, bias), pinned=pinned)


def onednn_float32(weight: Tensor, bias: Tensor | None, *, pinned: bool) -> PackedLinear:
    """oneDNN's blocked float32 weight; about 2.5 times MKL's speed on AMD CPUs."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def fn(x: Tensor) -> Tensor:
        out: Tensor = pointwise(x, packed, bias, "none", [], "")
        return out

    return _linear(fn, weight, "oneDNN fp32", (packed, bias), pinned=pinned)


def onednn_bfloat16(weight: Tensor, bias: Tensor | None, *, pinned: bool) -> PackedLinear:
    """oneDNN's blocked bfloat16 weight for every row count.

    Activations are rounded to bfloat16 at the input, products accumulate in float32, and the sum is
    rounded once to bfloat16 (the operation has no float32 output). ``bias`` is bfloat16. A single row
    is summed in another order than several, hence the tiles of the pinned class.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    pointwise, low = torch.ops.mkldnn._linear_pointwise.default, torch.bfloat16

    def fn(x: Tensor) -> Tensor:
        out: Tensor = pointwise(x.to(low), packed, bias, "none", [], "")
        return out

    return _linear(fn, weight, "oneDNN bf16", (packed, bias), pinned=pinned)


def fbgemm_float16(weight: Tensor, bias: Tensor | None, *, rounded: bool) -> PackedLinear:
    """FBGEMM's packed float16 weight for every row count.

    ``weight`` must be exact in float16 (see ``sixteen_bit``). Activations are rounded to bfloat16 like
    everywhere in a 16-bit weight set and products accumulate in float32; ``rounded`` rounds the sum to
    bfloat16, as the layers' other kernel does. Every row is summed alone, in one order: its bits do not
    depend on the number of rows.
    """
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), None if bias is None else bias.float())
    dynamic, low, high = torch.ops.quantized.linear_dynamic_fp16.default, torch.bfloat16, torch.float32

    def fn(x: Tensor) -> Tensor:
        out: Tensor = dynamic(x.to(low).to(high), packed)
        return out.to(low) if rounded else out

    n, k = weight.shape
    opaque = fbgemm_nbytes(n, k) + (0 if bias is None else 4 * n)
    return PackedLinear(fn, n, k, "FBGEMM fp16", (packed,), opaque)


def bfloat16_dense(weight: Tensor, bias: Tensor | None, *, pinned: bool) -> PackedLinear:
    """``F.linear`` in bfloat16, for devices without the packed operations."""

    def fn(x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), weight, bias)

    return _linear(fn, weight, "F.linear bf16", (weight, bias), pinned=pinned)


def fbgemm_nbytes(n: int, k: int) -> int:
    """Bytes of FBGEMM's packed float16 matrix: k in blocks of 512 rows, n in blocks of 16 columns, padded."""
    return 2 * (-(-k // 512) * 512) * (-(-n // 16) * 16)


def _linear(
    fn: LinearFn, weight: Tensor, kernel: str, held: tuple[Tensor | None, ...], *, pinned: bool
) -> PackedLinear:
    if pinned:
        fn, kernel = tiled(fn), f"{kernel}, {TILE}-row tiles"
    n, k = weight.shape
    return PackedLinear(fn, n, k, kernel, tuple(t for t in held if t is not None))


def _short(dtype: torch.dtype) -> str:
    return {torch.float64: "fp64", torch.float32: "fp32"}.get(dtype, str(dtype))
