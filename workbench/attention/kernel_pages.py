"""Attention by GPU kernels over the engine's pages, as they lie: decodes, drafts, and prompt chunks.

One step is at most three launches a layer: single rows by split-KV decode, draft trees and short chains by
tree attention, longer chains by a prefill kernel with a page table. Which kernels those are was chosen when
the plan was bound. Spans whose mask no kernel knows (a window over rows at positions that are not those of
their depth) are computed in torch; the plan holds them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.attention.pages import PagesPlan, TorchPages
from workbench.attention.spans import check_shape, check_span, is_chain
from workbench.engine.seams import AttentionShape, AttentionSpan
from workbench.kernels.layouts.tree import TreeRows, chain, tree_rows

SHORT = 16
"""Longest chain that goes to tree attention, which splits long contexts; longer ones fill prefill's tiles."""


@dataclass(frozen=True)
class Batch:
    """Spans that one kernel takes together, in the order of the step.

    ``rows`` int64 [R]: their query rows. ``table`` int32 [spans, pages], padded with page 0. ``starts`` and
    ``lengths`` int32 [spans]: tokens before the new ones, and with them. ``tree``: which new rows see which.
    """

    rows: Tensor
    table: Tensor
    starts: Tensor
    lengths: Tensor
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    tree: TreeRows | None = None


@dataclass(frozen=True)
class KernelPlan:
    """One step: what each kernel gets, and what is left to torch (its rows and its plan)."""

    shape: AttentionShape
    decode: Batch | None
    tree: Batch | None
    prefill: Batch | None
    left: tuple[Tensor, PagesPlan] | None


Kernel = Callable[[Batch, AttentionShape, Tensor, Tensor, Tensor], Tensor]
"""``(batch, shape, q [R, Hq, D], k, v [N, Hkv, P, D]) -> [R, Hq, D]``"""


class KernelPages:
    """The op on three chosen kernels; ``name`` says which they are."""

    def __init__(
        self, name: str, device: torch.device, *, decode: Kernel, tree: Kernel, prefill: Kernel
    ) -> None:
        self.name = name
        self._device = device
        self._decode, self._tree, self._prefill = decode, tree, prefill
        self._torch = TorchPages(device)

    def prepare(
        self, spans: Sequence[AttentionSpan], shape: AttentionShape, previous: Any = None
    ) -> KernelPlan:
        """Sort the spans by kernel and build their tables; raises as :class:`TorchPages` does."""
        check_shape(shape)
        kinds: dict[str, list[tuple[int, AttentionSpan]]] = {
            k: [] for k in ("decode", "tree", "prefill", "torch")
        }
        row = 0
        for i, span in enumerate(spans):
            check_span(i, span, shape.page_size)
            if span.n_new:
                kinds[_kind(span, shape)].append((row, span))
            row += span.n_new
        left = None
        if kinds["torch"]:
            plan = self._torch.prepare([s for _, s in kinds["torch"]], shape)
            left = (self._rows(kinds["torch"]), plan)
        decode, tree, prefill = (self._batch(kinds[k], shape, k) for k in ("decode", "tree", "prefill"))
        return KernelPlan(shape, decode, tree, prefill, left)

    def run(self, plan: KernelPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``[T, Hq*D]`` in ``q``'s dtype; ``q`` [T, Hq, D] scaled, ``k``, ``v`` [N, Hkv, P, D] contiguous."""
        x = q.to(k.dtype)
        kernels = ((plan.decode, self._decode), (plan.tree, self._tree), (plan.prefill, self._prefill))
        present = [(batch, kernel) for batch, kernel in kernels if batch is not None]
        if len(present) == 1 and plan.left is None:  # all rows, in the order of the step
            batch, kernel = present[0]
            return kernel(batch, plan.shape, x, k, v).to(q.dtype).flatten(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for batch, kernel in present:
            found = kernel(batch, plan.shape, x.index_select(0, batch.rows), k, v)
            out.index_copy_(0, batch.rows, found.to(q.dtype))
        if plan.left is not None:
            rows, left = plan.left
            out.flatten(1).index_copy_(0, rows, self._torch.run(left, q.index_select(0, rows), k, v))
        return out.flatten(1)

    def nbytes(self) -> int:
        """Bytes of buffers held between calls: those of the torch form, if it was needed."""
        return self._torch.nbytes()

    def _rows(self, chosen: Sequence[tuple[int, AttentionSpan]]) -> Tensor:
        rows = [row + i for row, span in chosen for i in range(span.n_new)]
        return torch.tensor(rows, dtype=torch.int64, device=self._device)

    def _batch(
        self, chosen: Sequence[tuple[int, AttentionSpan]], shape: AttentionShape, kind: str
    ) -> Batch | None:
        if not chosen:
            return None
        spans = [span for _, span in chosen]
        lengths = [s.start + s.n_new for s in spans]
        used = [-(-n // shape.page_size) for n in lengths]
        # As wide as the longest prefix with the most rows: kernels check that bound without reading back.
        width = -(-(max(s.start for s in spans) + max(s.n_new for s in spans)) // shape.page_size)
        table = [[*s.table[:n], *([0] * (width - n))] for s, n in zip(spans, used, strict=True)]
        rows = None
        if kind == "tree":
            parents = [chain(s.n_new) if s.parents is None else s.parents for s in spans]
            rows = tree_rows(parents, window=shape.window).to(self._device)

        def numbers(values: Any) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self._device)

        return Batch(
            self._rows(chosen),
            numbers(table),
            numbers([s.start for s in spans]),
            numbers(lengths),
            tuple(s.n_new for s in spans),
            tuple(lengths),
            rows,
        )


def _kind(span: AttentionSpan, shape: AttentionShape) -> str:
    """The kernel that takes a span, or ``torch``."""
    if shape.window is not None and not _at_depth(span):
        return "torch"
    if span.n_new == 1:
        return "decode"
    return "prefill" if is_chain(span.parents) and span.n_new > SHORT else "tree"


def _at_depth(span: AttentionSpan) -> bool:
    """Whether each row stands as many positions behind the first as it is deep: windows count so."""
    depth: list[int] = []
    for i in range(span.n_new):
        parent = i - 1 if span.parents is None else span.parents[i]
        depth.append(0 if parent < 0 else depth[parent] + 1)
    return all(p - span.positions[0] == d for p, d in zip(span.positions, depth, strict=True))
