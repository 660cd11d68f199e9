"""A strided tensor seen as one matrix, so that a two-dimensional TMA box can cut tiles of any head from it.

TMA addresses are base + row * stride + column; strides may overlap. Heads become columns where they lie
inside a row (``[T, H, D]``), or row offsets where they lie apart (``[H, T, D]`` transposed, pages head by
head). So slices of a fused QKV buffer, transposed heads and pages need no copy and no further descriptor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from workbench.spec.errors import UnsupportedInput


@dataclass(frozen=True)
class Matrix:
    """Extent and row stride in elements; where head h and page n start, in rows and columns."""

    rows: int
    columns: int
    stride: int
    head_rows: int
    head_columns: int
    page_rows: int

    @property
    def starts(self) -> tuple[int, int, int]:
        """Offsets of the next head and the next page."""
        return self.head_rows, self.head_columns, self.page_rows


def matrix(x: Tensor, name: str) -> Matrix:
    """``[T, H, D]`` or ``[N, H, P, D]`` as a matrix; raises ``UnsupportedInput`` for other strides."""
    paged = x.ndim == 4
    tokens, heads, dim = x.shape[2 if paged else 0], x.shape[1], x.shape[-1]
    pages = x.shape[0] if paged else 1
    stride = x.stride(2 if paged else 0) if tokens > 1 else heads * dim
    head, page = x.stride(1) if heads > 1 else 0, x.stride(0) if paged and pages > 1 else 0
    if x.stride(-1) != 1 or stride < dim or stride * x.element_size() % 16 or x.data_ptr() % 16:
        raise UnsupportedInput(
            f"{name} has strides {tuple(x.stride())} and starts at byte {x.data_ptr() % 16} of 16.",
            hint="The last axis must be contiguous, rows and start 16-byte aligned: use .contiguous().",
        )
    by_rows = head >= stride
    if (head % stride and by_rows) or page % stride:
        raise UnsupportedInput(
            f"{name} has strides {tuple(x.stride())}: heads or pages are no whole number of rows apart.",
            hint="Use .contiguous().",
        )
    head_rows, head_columns = (head // stride, 0) if by_rows else (0, head)
    rows = tokens + (heads - 1) * head_rows + (pages - 1) * (page // stride)
    columns = (heads - 1) * head_columns + dim
    if rows >= 2**31 or columns >= 2**31:
        raise UnsupportedInput(f"{name} is too large for 32-bit TMA coordinates.", hint="Split the batch.")
    return Matrix(rows, columns, stride, head_rows, head_columns, page // stride)


def descriptor(x: Tensor, of: Matrix, box: tuple[int, int], bits: int) -> Any:
    """A host TMA descriptor with 128-byte swizzle for boxes of ``box`` elements."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    swizzle = min(128, box[1] * bits // 8)
    return TensorDescriptor(
        x, [of.rows, of.columns], [of.stride, 1], list(box), NVMMASharedLayout(swizzle, bits)
    )
