"""Quest: a decoding query reads the pages that could matter to it, chosen by bounds; nothing is evicted.

Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (arXiv 2406.10774, ICML
2024), section 3.3: per page the smallest and largest value of every key channel are kept; the sum over
channels of max(q·low, q·high) bounds every logit of the page from above; pages with the highest bounds are
read, in all layers but the first two. The page being filled is always read. Prompts are computed densely, so
what a row sees depends on its position only. With grouped heads a KV head's pages are chosen by the largest
bound of its queries. A budget that covers the sequence is the dense form, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.attention.pages import TorchPages
from workbench.attention.pinned import PinnedAttention
from workbench.attention.spans import ancestors
from workbench.attention.tile_groups import one_thread
from workbench.engine.bounds import LayerBounds
from workbench.engine.seams import AttentionOp, AttentionShape, AttentionSpan
from workbench.spec.errors import InvariantError
from workbench.spec.technique import Claim, TechniqueSpec, option


@dataclass(frozen=True)
class Config:
    """How much a decoding query reads."""

    budget: int = option(
        256,
        low=32,
        high=65536,
        unit="tokens",
        help="Tokens read per query and KV head, in whole pages, that of the newest token included; at least "
        "one. Shorter sequences are read whole.",
    )
    dense_layers: int = option(
        2, low=0, high=64, help="First layers that read everything: their attention is not sparse."
    )


SPEC = TechniqueSpec(
    id="quest",
    title="Quest",
    family="attention",
    seam="attention",
    kind="lossy",
    summary=(
        "Keeps the whole cache and reads a part of it: each decoding query takes the pages whose bounds "
        "promise the largest logits. Saves reads, not memory; what is not read now can be read later, so "
        "nothing is lost for good. Small pages choose much better: give paged a page size of 16, as the "
        "paper does."
    ),
    paper="https://arxiv.org/abs/2406.10774",
    stages=("attention",),
    claims_slot=("attention", "kv_selection"),
    needs=("paged",),
    sweep=("budget=512", "", "budget=128"),
    claims=(
        Claim(
            "Up to 7.03x faster self-attention and 2.23x lower latency.",
            "long contexts, own CUDA kernels; the abstract on arXiv has the two numbers the other way round",
            "https://github.com/mit-han-lab/Quest",
        ),
    ),
)


def page_bounds(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Upper bound of every page's logits, [Hkv, n]: largest over the queries of a KV head.

    ``q`` [Hkv, G, D] scaled; ``low``, ``high`` [n, Hkv, D]. max(q·low, q·high) per channel is q·high where q
    is positive and q·low where it is negative, so two products do.
    """
    low, high = (x.permute(1, 2, 0) for x in (low, high))  # [Hkv, D, n]
    return (q.clamp(min=0) @ high + q.clamp(max=0) @ low).amax(1)


def best_pages(bounds: Tensor, count: int) -> Tensor:
    """The ``count`` highest of ``bounds`` [Hkv, n] per head, int64 ascending; of equals the older page."""
    return bounds.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values


def attend_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: Tensor,
    hidden: Tensor,
    soft_cap: float | None,
    order: Tensor | None = None,
) -> Tensor:
    """Attention [Hkv, G, D] of a token's queries ``q`` [Hkv, G, D] over its heads' ``pages`` int64 [Hkv, c].

    ``hidden`` bool [P]: slots of the last page, in ``order``, that it does not see, NaN allowed. Products in
    the dtype of ``q``; softmax in it or float32.
    """
    at = torch.arange(len(pages), device=pages.device)[:, None]
    keys, values = (x[pages, at].to(q.dtype).flatten(1, 2) for x in (k, v))  # [Hkv, c * P, D]
    size = len(hidden)
    if order is not None:
        for x in (keys, values):
            x[:, -size:] = x[:, -size:].index_select(1, order)
    values[:, -size:].masked_fill_(hidden[:, None], 0.0)
    s = q @ keys.transpose(1, 2)
    if soft_cap is not None:
        s = soft_cap * torch.tanh(s / soft_cap)
    s[..., -size:].masked_fill_(hidden, float("-inf"))
    wide = torch.promote_types(q.dtype, torch.float32)
    return s.softmax(-1, dtype=wide).to(q.dtype) @ values


@dataclass(frozen=True)
class SparseRow:
    """A decoding row: its page ids in order, the last being its own, and what it does not see of that.

    ``order``: of a row in a draft tree, the slots of that page with its ancestors behind each other, as they
    lie once they are accepted: so it has the bits of the row that follows them in a chain.
    """

    row: int
    pages: Tensor
    hidden: Tensor
    order: Tensor | None = None


@dataclass(frozen=True)
class QuestPlan:
    """A step: all spans densely, for layers that read everything; rows that do not; the rest densely."""

    shape: AttentionShape
    whole: Any
    sparse: tuple[SparseRow, ...]
    rest: Any = None
    rest_rows: Tensor | None = None


class QuestAttention:
    """Chooses pages in rows that decode; ``dense`` attends wherever everything is read."""

    reads_bounds = True

    def __init__(self, config: Config, dense: AttentionOp, device: torch.device, pinned: bool) -> None:
        self._config, self._dense, self._device = config, dense, device
        self._threads = one_thread if pinned else nullcontext
        self._wide = pinned
        self.name = f"quest/1/{config.budget}/{config.dense_layers}/{dense.name}"

    def prepare(
        self, spans: Sequence[AttentionSpan], shape: AttentionShape, previous: Any = None
    ) -> QuestPlan:
        """Plan a step. Raises what the dense form raises for spans that contradict themselves."""
        old = previous.whole if isinstance(previous, QuestPlan) and not previous.sparse else None
        whole = self._dense.prepare(spans, shape, old)
        if shape.window is not None:
            return QuestPlan(shape, whole, ())
        sparse: list[SparseRow] = []
        rest: list[AttentionSpan] = []
        rows: list[int] = []
        first = 0
        for span in spans:
            here = range(first, first + span.n_new)
            pages = -(-(span.start + span.n_new) // shape.page_size)
            if span.decodes and pages > self._pages(shape):
                sparse += self._rows(first, span, shape)
            else:
                rest.append(span)
                rows += here
            first += span.n_new
        if not sparse or not rest:
            return QuestPlan(shape, whole, tuple(sparse))
        at = torch.tensor(rows, dtype=torch.int64, device=self._device)
        return QuestPlan(shape, whole, tuple(sparse), self._dense.prepare(rest, shape), at)

    def run(
        self, plan: QuestPlan, q: Tensor, k: Tensor, v: Tensor, bounds: LayerBounds | None = None
    ) -> Tensor:
        """``[T, Hq*D]`` in ``q``'s dtype. Shapes as in the seam; without bounds everything is read."""
        if not plan.sparse or bounds is None or bounds.layer < self._config.dense_layers:
            return self._dense.run(plan.whole, q, k, v)
        out = torch.empty_like(q)
        if plan.rest_rows is not None:
            some = self._dense.run(plan.rest, q.index_select(0, plan.rest_rows), k, v)
            out.index_copy_(0, plan.rest_rows, some.view(-1, *q.shape[1:]))
        count, shape = self._pages(plan.shape) - 1, plan.shape
        dtype = torch.promote_types(k.dtype, torch.float32) if self._wide else k.dtype
        with self._threads():
            for row in plan.sparse:
                x = q[row.row].to(dtype).view(shape.kv_heads, -1, shape.head_dim)
                behind = row.pages[:-1]
                low, high = (b.index_select(0, behind).to(dtype) for b in (bounds.low, bounds.high))
                best = behind[best_pages(page_bounds(x, low, high), count)]
                pages = torch.cat((best, row.pages[-1:].expand(shape.kv_heads, 1)), 1)
                out[row.row] = attend_pages(x, k, v, pages, row.hidden, shape.soft_cap, row.order).reshape(
                    q.shape[1:]
                )
        return out.flatten(1)

    def nbytes(self) -> int:
        """Bytes of buffers that the dense form holds between calls."""
        held = getattr(self._dense, "nbytes", None)
        return int(held()) if held is not None else 0

    def _pages(self, shape: AttentionShape) -> int:
        """Pages a row reads per KV head."""
        return max(1, self._config.budget // shape.page_size)

    def _rows(self, first: int, span: AttentionSpan, shape: AttentionShape) -> list[SparseRow]:
        """The rows of a span that lies in one page."""
        size = shape.page_size
        own = span.start // size
        if own != (span.start + span.n_new - 1) // size:
            raise InvariantError(
                f"{span.n_new} decoding rows from slot {span.start} leave their page.",
                hint="Cut blocks at the end of the prompt and, behind it, of pages.",
            )
        pages = torch.tensor(span.table[: own + 1], dtype=torch.int64, device=self._device)
        slot = span.start - own * size
        out = []
        for i, lineage in enumerate(ancestors(span.parents, span.n_new)):
            seen = [slot + int(n) for n in lineage.nonzero()[0]]
            hidden = torch.ones(size, dtype=torch.bool)
            hidden[: slot + len(seen)] = False
            order = None
            if span.parents is not None:
                others = sorted({*range(slot, size)} - {*seen})
                order = torch.tensor([*range(slot), *seen, *others], device=self._device)
            out.append(SparseRow(first + i, pages, hidden.to(self._device), order))
        return out


def bind(config: Config, context: Any) -> QuestAttention:
    """The form, over the one that ``sdpa`` would be."""
    pinned = context.numerics == "pinned"
    dense: AttentionOp = PinnedAttention(context.device) if pinned else TorchPages(context.device)
    return QuestAttention(config, dense, context.device, pinned)
