"""Attention of the ``compiled`` technique: drafts and decodes where the pages lie, long chunks as products.

A decode or draft reads keys and values once per sequence; scores, softmax and sums are float32, and each
thread takes an equal share of all pages, also of a single long sequence. For a long chunk pages become
operands of products once per layer, with weights rounded to bfloat16. Fast class: the order of summation
depends on the number of threads and on the batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import CDLL, addressof
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.attention.dense import DensePlan, plan_dense, run_dense
from workbench.attention.fixed import fast_fixed
from workbench.attention.masks import plain
from workbench.attention.pages import SHORT, TorchPages
from workbench.attention.spans import check_shape, check_span, first_visible, shift
from workbench.engine.seams import AttentionOp, AttentionShape, AttentionSpan, FixedRead
from workbench.kernels.cpu import library

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Chunk:
    """A long chain: ``row`` of the step, ``rows``, committed slots ``start``, first visible page, where its
    table begins, and its slots from that page on, padded to whole panels."""

    row: int
    rows: int
    start: int
    first: int
    table: int
    slots: int


@dataclass
class CompiledPlan:
    """One step: its short spans as arrays that the kernel reads, and each long chunk.

    ``spans`` int32 [n, 6]: row, rows, start, first and last page, where its table begins in ``tables`` int32.
    By row of the step: ``low`` int32 is the first slot it sees, ``seen`` uint32 the new rows (short spans).
    """

    shape: AttentionShape
    rows: int
    spans: array[int]
    tables: array[int]
    low: array[int]
    seen: array[int]
    chunks: tuple[Chunk, ...]
    dense: tuple[DensePlan, ...]
    source: tuple[AttentionSpan, ...]
    short: tuple[int, ...]  # of short spans the kernel's first arguments: addresses of the arrays
    other: Any = field(default=None)  # the torch plan, once K or V is not what the kernel reads


class CompiledPages:
    """Attention in C++ over bfloat16 pages; anything else goes to :class:`TorchPages`."""

    name = "compiled-pages"

    def __init__(self, kernels: CDLL) -> None:
        self.kernels = kernels
        self._attend, self._attend_chunk = kernels.attend, kernels.attend_chunk
        self._torch: AttentionOp = TorchPages()
        self._structs: dict[AttentionShape, library.Shape] = {}

    def prepare(
        self, spans: Sequence[AttentionSpan], shape: AttentionShape, previous: Any = None
    ) -> CompiledPlan:
        """Arrays of a step; ``previous`` is not needed.

        Raises :class:`WrongShape` or :class:`InvariantError` for spans or shapes that contradict themselves.
        """
        if shape not in self._structs:
            check_shape(shape)
            self._structs[shape] = library.Shape(
                shape.heads, shape.kv_heads, shape.head_dim, shape.page_size, shape.soft_cap or 0.0
            )
        short, tables, low, seen = array("i"), array("i"), array("i"), array("I")
        dense, chunks, row = [], list[Chunk](), 0
        for i, span in enumerate(spans):
            check_span(i, span, shape.page_size)
            n = span.n_new
            first = first_visible(span, shape.window) // shape.page_size
            last = (span.start + n - 1) // shape.page_size + 1
            if n > SHORT:
                if plain(span, shape.window) and shape.head_dim % 2 == 0:
                    slots = span.start + n - first * shape.page_size
                    slots += -slots % library.COLUMNS
                    chunks.append(Chunk(row, n, span.start, first, len(tables), slots))
                    tables.extend(span.table[:last])
                else:
                    dense.append(plan_dense(row, span, shape, CPU))
                reach = span.start + n if shape.window is None else shape.window
                low.extend(max(0, slot - reach + 1) for slot in range(span.start, span.start + n))
                seen.extend([0] * n)
            elif n:
                short.extend((row, n, span.start, first, last, len(tables)))
                tables.extend(span.table[:last])
                _visible(span, shape.window, low, seen)
            row += n
        pointers = (_pointer(tables), _pointer(low), _pointer(seen))
        addresses = (addressof(self._structs[shape]), _pointer(short), len(short) // 6, *pointers)
        return CompiledPlan(
            shape, row, short, tables, low, seen, tuple(chunks), tuple(dense), tuple(spans), addresses
        )

    def run(self, plan: CompiledPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[T, Hq*D]`` in ``q``'s dtype; ``q`` [T, Hq, D] scaled; ``k``, ``v`` [N, Hkv, P, D].

        Without bfloat16, contiguous K and V on the CPU the torch form takes the step.
        """
        if not (_readable(k) and _readable(v)):
            if plan.other is None:
                plan.other = self._torch.prepare(plan.source, plan.shape)
            return self._torch.run(plan.other, q, k, v)
        wide = q.to(torch.float32)
        if wide.stride(2) != 1 or wide.stride(1) != wide.shape[2]:
            wide = wide.contiguous()
        out = torch.empty(plan.rows, plan.shape.heads * plan.shape.head_dim, dtype=torch.float32)
        if plan.spans:
            self._attend(
                *plan.short,
                wide.data_ptr(),
                wide.stride(0),
                k.data_ptr(),
                v.data_ptr(),
                out.data_ptr(),
                torch.get_num_threads(),
            )
        for chunk in plan.chunks:
            self._chunk(plan, chunk, wide, k, v, out)
        if plan.dense:
            narrow, target = q.to(k.dtype), out.view(q.shape)
            for part in plan.dense:
                run_dense(part, narrow, k, v, target)
        return out.to(q.dtype)

    def _chunk(self, plan: CompiledPlan, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Write the rows of one long chunk; keys and values become panels in scratch of this call."""
        shape = plan.shape
        dim, columns = shape.head_dim, library.COLUMNS
        keys = torch.empty(shape.kv_heads * chunk.slots * dim, dtype=torch.bfloat16)
        values = torch.empty(shape.kv_heads * chunk.slots * (dim + -dim % columns), dtype=torch.bfloat16)
        self._attend_chunk(
            addressof(self._structs[shape]),
            chunk.row,
            chunk.rows,
            chunk.start,
            chunk.first,
            _pointer(plan.tables) + chunk.table * plan.tables.itemsize,
            _pointer(plan.low),
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            v.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )

    def fixed(self, tables: Tensor, first: Tensor, rows: int, shape: AttentionShape) -> FixedRead:
        """See :class:`workbench.engine.seams.FixedAttention`: in torch."""
        return fast_fixed(tables, first, rows, shape)

    def nbytes(self) -> int:
        """Bytes of buffers held between calls: none, unless the torch form was needed."""
        return self._torch.nbytes() if isinstance(self._torch, TorchPages) else 0


def _visible(span: AttentionSpan, window: int | None, low: array[int], seen: array[int]) -> None:
    """Append, for every row of a span, its first visible committed slot and its visible new rows as bits."""
    family: list[int] = []
    for i, position in enumerate(span.positions):
        parent = i - 1 if span.parents is None else span.parents[i]
        family.append((family[parent] if parent >= 0 else 0) | 1 << i)
        if window is None:
            low.append(0)
            seen.append(family[i])
            continue
        low.append(min(max(0, position - shift(span) - window + 1), span.start))
        near = sum(1 << j for j in range(i + 1) if span.positions[j] > position - window)
        seen.append(family[i] & near)


def _readable(t: Tensor) -> bool:
    return t.dtype is torch.bfloat16 and t.is_contiguous() and t.device.type == "cpu"


def _pointer(values: array[int]) -> int:
    return values.buffer_info()[0]
