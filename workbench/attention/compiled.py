"""Attention of the ``compiled`` technique: decodes and drafts in C++ where the pages lie, the rest in torch.

Keys and values are read once per sequence, in bfloat16; scores, softmax and sums are float32. Each thread
takes an equal share of all pages, also of a single long sequence. Fast class: the order of summation depends
on the number of threads and on the batch.
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
from workbench.attention.pages import SHORT, TorchPages
from workbench.attention.spans import check_shape, check_span, first_visible, shift
from workbench.engine.seams import AttentionOp, AttentionShape, AttentionSpan
from workbench.kernels.cpu import library

CPU = torch.device("cpu")


@dataclass
class CompiledPlan:
    """One step: its short spans as arrays that the kernel reads, and each long chunk.

    ``spans`` int32 [n, 6]: row, rows, start, first and last page, where its table begins in ``tables`` int32.
    By row of the step: ``low`` int32 is the first committed slot it sees, ``seen`` uint32 the new rows.
    """

    shape: AttentionShape
    rows: int
    spans: array[int]
    tables: array[int]
    low: array[int]
    seen: array[int]
    dense: tuple[DensePlan, ...]
    source: tuple[AttentionSpan, ...]
    other: Any = field(default=None)  # the torch plan, once K or V is not what the kernel reads


class CompiledPages:
    """Attention in C++ over bfloat16 pages; anything else goes to :class:`TorchPages`."""

    name = "compiled-pages"

    def __init__(self, kernels: CDLL) -> None:
        self._attend = kernels.attend
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
        dense, row = [], 0
        for i, span in enumerate(spans):
            check_span(i, span, shape.page_size)
            n = span.n_new
            if n > SHORT:
                dense.append(plan_dense(row, span, shape, CPU))
                low.extend([0] * n)
                seen.extend([0] * n)
            elif n:
                first = first_visible(span, shape.window) // shape.page_size
                last = (span.start + n - 1) // shape.page_size + 1
                short.extend((row, n, span.start, first, last, len(tables)))
                tables.extend(span.table[:last])
                _visible(span, shape.window, low, seen)
            row += n
        return CompiledPlan(shape, row, short, tables, low, seen, tuple(dense), tuple(spans))

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
        out = torch.empty(plan.rows, plan.shape.heads * plan.shape.head_dim)
        if plan.spans:
            self._attend(
                addressof(self._structs[plan.shape]),
                _pointer(plan.spans),
                len(plan.spans) // 6,
                _pointer(plan.tables),
                _pointer(plan.low),
                _pointer(plan.seen),
                wide.data_ptr(),
                wide.stride(0),
                k.data_ptr(),
                v.data_ptr(),
                out.data_ptr(),
                torch.get_num_threads(),
            )
        if plan.dense:
            narrow, target = q.to(k.dtype), out.view(q.shape)
            for chunk in plan.dense:
                run_dense(chunk, narrow, k, v, target)
        return out.to(q.dtype)

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
