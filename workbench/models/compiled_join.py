"""Norms, and linears that read several streams side by side, in the compiled kernels.

What a draft head has in front of its layer, and the norm behind the last layer of any model: one call where
torch takes a dozen operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL, addressof, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.kernels.cpu import library
from workbench.models.block import Rotation
from workbench.models.compiled import HIGH, LOW, Native, NativeLayer, wide_rows
from workbench.models.norms import Norm


@dataclass(frozen=True)
class NativeJoin:
    """The structure, and the gains that its pointers lead to."""

    struct: library.Join
    gains: tuple[Tensor | None, ...]


def native_join(gains: Sequence[Tensor | None], eps: float, width: int) -> NativeJoin:
    """Describe parts of ``width`` inputs with these gains to the kernels, four at most."""
    wide = tuple(None if g is None else g.to(HIGH).contiguous() for g in gains)
    pointers = (c_void_p * 4)(*(None if g is None else g.data_ptr() for g in wide))
    return NativeJoin(library.Join(pointers, eps, len(wide), width), wide)


def compiled_joined(gains: Sequence[Tensor | None], eps: float, native: Native) -> Callable[..., Tensor]:
    """Parts [T, H] -> float32 [T, n], sums rounded as those of layers."""
    n, k = native.struct.n, native.struct.k
    join = native_join(gains, eps, k // len(gains))
    first, second, run = addressof(join.struct), addressof(native.struct), native.kernels.joined

    def fn(*parts: Tensor) -> Tensor:
        _ = native, join  # what the addresses lead to
        rows = [wide_rows(x) for x in parts]
        out = torch.empty(rows[0].shape[0], n, dtype=HIGH)
        scratch = torch.empty(rows[0].shape[0], k + k % 2, dtype=LOW)
        run(
            first,
            second,
            out.shape[0],
            _pointers(rows),
            scratch.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    return fn


def compiled_entrance(
    layer: NativeLayer, gains: Sequence[Tensor | None]
) -> Callable[[Sequence[Tensor], Rotation], tuple[Tensor, Tensor, Tensor]]:
    """A layer's q, k and v of joined parts [T, H], as a compiled block's ``enter`` gives them."""
    struct = layer.struct
    heads, kv_heads, dim, k = struct.heads, struct.kv_heads, struct.head_dim, struct.qkv.k
    join = native_join(gains, struct.eps, k // len(gains))
    first, second, run = addressof(join.struct), addressof(struct), layer.kernels.joined_in

    def enter(parts: Sequence[Tensor], rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        _ = layer, join  # what the addresses lead to
        rows, (cos, sin) = [wide_rows(x) for x in parts], rotation
        qkv = torch.empty(rows[0].shape[0], heads + 2 * kv_heads, dim, dtype=HIGH)
        scratch = torch.empty(rows[0].shape[0], k + k % 2, dtype=LOW)
        run(
            first,
            second,
            qkv.shape[0],
            _pointers(rows),
            cos.data_ptr(),
            sin.data_ptr(),
            cos.stride(0),
            scratch.data_ptr(),
            qkv.data_ptr(),
            torch.get_num_threads(),
        )
        return qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]

    return enter


def compiled_norm(kernels: CDLL, gain: Tensor, eps: float) -> Norm:
    """The norm of rows [T, H] of a 16-bit weight set's stream."""
    wide, width, run = gain.to(HIGH).contiguous(), gain.shape[-1], kernels.norm_rows

    def norm(x: Tensor) -> Tensor:
        x = wide_rows(x)
        out = torch.empty_like(x)
        run(wide.data_ptr(), eps, width, x.shape[0], x.data_ptr(), out.data_ptr())
        return out

    return norm


def _pointers(rows: Sequence[Tensor]) -> c_void_p:
    """Their addresses in a row; the caller keeps the tensors, the result the array."""
    return (c_void_p * len(rows))(*(x.data_ptr() for x in rows))  # type: ignore[return-value]
