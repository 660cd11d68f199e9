"""The smallest and the largest key of every full page, per layer, KV head and channel.

What attention that reads few pages decides by (Quest, arXiv 2406.10774, section 3.3). Bounds are those of the
keys attention would read, behind the codec. They are taken when a decode first sees a page from behind, so
the page is full and committed and no draft can widen them; a page that changes hands forgets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor

from workbench.engine.seams import AttentionOp, PageGeometry

if TYPE_CHECKING:
    from workbench.engine.store import PageStore, ReadPlan


@dataclass(frozen=True)
class LayerBounds:
    """``low``, ``high`` [N, Hkv, D] of the pages a step reads, in the order of K; the model's ``layer``."""

    layer: int
    low: Tensor
    high: Tensor


class BoundedAttention(AttentionOp, Protocol):
    """An :class:`AttentionOp` that chooses pages by their bounds in rows that decode.

    It is given them in groups without a window; blocks of such rows end where a page ends.
    """

    reads_bounds: bool

    def run(self, plan: Any, q: Tensor, k: Tensor, v: Tensor, bounds: LayerBounds | None = None) -> Tensor:
        """As :meth:`AttentionOp.run`; bounds of pages that no row sees from behind hold anything."""
        ...


def reads_bounds(op: AttentionOp) -> TypeGuard[BoundedAttention]:
    """Whether an attention form wants bounds."""
    return bool(getattr(op, "reads_bounds", False))


class PageBounds:
    """Bounds of one pool's pages, [layers, pages + 1, Hkv, D] in the dtype of its keys."""

    def __init__(self, geometry: PageGeometry) -> None:
        shape = (geometry.layers, geometry.pages + 1, geometry.kv_heads, geometry.head_dim)
        self.low = torch.zeros(shape, dtype=geometry.dtype, device=geometry.device)
        self.high = torch.zeros_like(self.low)
        self._known: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes held: KV metadata."""
        return self.low.untyped_storage().nbytes() + self.high.untyped_storage().nbytes()

    def forget(self, pages: Sequence[int]) -> None:
        """These pages have a new owner, who has not filled them yet."""
        self._known.difference_update(pages)

    def learn(self, store: PageStore, pages: Sequence[int]) -> None:
        """Take the bounds of full, committed ``pages`` that are not known yet."""
        new = sorted(set(pages) - self._known)
        if not new:
            return
        read = store.plan_read(new)
        index = torch.tensor(new, device=self.low.device)
        rows = index if read.compact is None else torch.tensor([read.compact[p] for p in new])
        for layer in range(store.geometry.layers):
            keys = store.read(layer, read)[0].index_select(0, rows.to(index.device))  # [n, Hkv, P, D]
            self.low[layer, index] = keys.amin(2)
            self.high[layer, index] = keys.amax(2)
        self._known.update(new)

    def of(self, local: int, layer: int, read: ReadPlan) -> LayerBounds:
        """Bounds of the model's ``layer``, ``local`` in this store, aligned with what ``read`` gives."""
        low, high = self.low[local], self.high[local]
        if read.compact is not None:
            ids = torch.tensor(list(read.compact), dtype=torch.int64, device=low.device)
            low, high = low.index_select(0, ids), high.index_select(0, ids)
        return LayerBounds(layer, low, high)
