"""Executes a :class:`StepPlan`: plain data in, logits out. Every rank of a parallel engine runs this.

Index work is done once per KV group and step; the layers then only write K/V and attend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.bounds import reads_bounds
from workbench.engine.seams import AttentionOp, AttentionShape, AttentionSpan, KernelAttention, StepPlan
from workbench.engine.store import PageStore, ReadPlan
from workbench.models.config import KVGroup
from workbench.models.decoder import Decoder


@dataclass(frozen=True)
class StepOutput:
    """Logits [R, V], ``hidden`` [R, H] and ``streams`` [R, H] (before the final norm) of the rows asked for;
    ``offsets[i]`` is span ``i``'s first.

    ``queries``: by layer the queries [T, Hq, D] (rotated, scaled) of all rows, if they were asked for.
    """

    logits: Tensor
    offsets: tuple[int, ...]
    hidden: Tensor
    streams: Tensor
    captured: dict[int, Tensor]
    queries: dict[int, Tensor]


@dataclass(frozen=True)
class Prepared:
    """Tensors of one step: ids and positions [T], rows that need logits, K/V reads and writes per group."""

    ids: Tensor
    positions: Tensor
    rows: Tensor | None
    offsets: tuple[int, ...]
    reads: list[ReadPlan]
    wheres: list[Tensor]


@dataclass(frozen=True)
class Part:
    """Where some KV heads of a layer live: KV group, layer within it, its KV heads and their query heads."""

    group: int
    local: int
    heads: slice
    queries: slice


class Executor:
    """One model, its page stores (one per KV group) and an attention op.

    ``groups`` are the KV groups behind the stores; by default those of the model. Several groups may share a
    layer when each holds some of its KV heads, in order. ``below``: layers of the stores before its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        stores: list[PageStore],
        op: AttentionOp,
        groups: Sequence[KVGroup] | None = None,
        below: int = 0,
    ) -> None:
        config = decoder.config
        groups = config.kv_groups if groups is None else tuple(groups)
        per_kv = config.num_heads // config.num_kv_heads
        sides = [group.heads or (0, config.num_kv_heads) for group in groups]
        self.decoder = decoder
        self.stores = stores
        self.op = op
        self.groups = groups
        self.device = stores[0].geometry.device
        self._page_size = stores[0].geometry.page_size
        self.shapes = [
            AttentionShape(
                heads=(end - first) * per_kv,
                kv_heads=end - first,
                head_dim=config.head_dim,
                page_size=self._page_size,
                window=group.window,
                soft_cap=config.attn_softcap,
            )
            for group, (first, end) in zip(groups, sides, strict=True)
        ]
        self.parts: dict[int, list[Part]] = {}
        for g, (group, (first, end)) in enumerate(zip(groups, sides, strict=True)):
            for local, layer in enumerate(group.layers, below):
                heads, queries = slice(first, end), slice(first * per_kv, end * per_kv)
                self.parts.setdefault(layer, []).append(Part(g, local, heads, queries))
        self._plans: list[Any] = [None] * len(stores)

    def prepare(self, plan: StepPlan) -> Prepared:
        """Index work of a step: rows, slots to write, pages to read, attention plans."""
        tokens = [t for s in plan.spans for t in s.tokens]
        positions = torch.tensor([p for s in plan.spans for p in s.positions], device=self.device)
        rows: list[int] = []
        offsets: list[int] = []
        end = 0
        for span in plan.spans:
            end += span.n_new
            offsets.append(len(rows))
            rows.extend(range(end - span.logits, end))
        reads, wheres = self._begin(plan, positions)
        return Prepared(
            ids=torch.tensor(tokens, device=self.device),
            positions=positions,
            rows=None
            if len(rows) == len(tokens)
            else torch.tensor(rows, dtype=torch.int64, device=self.device),
            offsets=tuple(offsets),
            reads=reads,
            wheres=wheres,
        )

    def forward(
        self,
        step: Prepared,
        capture: tuple[int, ...] = (),
        *,
        queries: bool = False,
        states: Tensor | None = None,
        layers: range | None = None,
    ) -> StepOutput:
        """Run the model over a prepared step: writes K/V, attends, returns the logits asked for.

        ``states`` [T, H]: what a head that reads hidden states is given beside ids; to a model that is run
        in part (``layers``), the stream that enters it.
        """
        stores, plans, op, home = self.stores, self._plans, self.op, self.parts
        reads, wheres = step.reads, step.wheres
        asked: dict[int, Tensor] = {}

        def part(layer: int, at: Part, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store = stores[at.group]
            store.write(at.local, wheres[at.group], k, v)
            keys, values = store.read(at.local, reads[at.group])
            if store.bounds is None or not reads_bounds(op):
                return op.run(plans[at.group], q, keys, values)
            bounds = store.bounds.of(at.local, layer, reads[at.group])
            return op.run(plans[at.group], q, keys, values, bounds)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if queries:
                asked[layer] = q
            parts = home[layer]
            if len(parts) == 1:
                return part(layer, parts[0], q, k, v)
            outs = [part(layer, p, q[:, p.queries], k[:, p.heads], v[:, p.heads]) for p in parts]
            return torch.cat(outs, 1)

        out = self.decoder.forward(
            step.ids,
            step.positions,
            attend,
            logits_rows=step.rows,
            capture=capture,
            states=states,
            layers=layers,
        )
        if self.device.type == "cuda":  # its time belongs to this phase
            torch.cuda.synchronize(self.device)
        return StepOutput(out.logits, step.offsets, out.hidden, out.streams, dict(out.captured), asked)

    @property
    def in_kernels(self) -> bool:
        """Whether compiled kernels can write and read its pages themselves: plain bfloat16 ones of whole
        layers, all of whose keys are seen, by attention that is the kernels' own."""
        return isinstance(self.op, KernelAttention) and all(
            store.codec.in_place
            and store.geometry.dtype is torch.bfloat16
            and group.window is None
            and group.heads is None
            for store, group in zip(self.stores, self.groups, strict=True)
        )

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [N, Hkv, P, D] of a layer in one group, whose format attention reads in place."""
        (at,) = self.parts[layer]
        store = self.stores[at.group]
        return store.read(at.local, store.plan_read(()))

    def _begin(self, plan: StepPlan, positions: Tensor) -> tuple[list[ReadPlan], list[Tensor]]:
        """Slots to write, pages to read and the attention plan of every KV group."""
        size = self._page_size
        reads, wheres = [], []
        for g, store in enumerate(self.stores):
            slots: list[int] = []
            spans: list[AttentionSpan] = []
            tables: list[tuple[int, ...]] = []
            for s in plan.spans:
                table, used = s.tables[g], s.used(g)
                last = used + s.n_new
                if store.bounds is not None and s.decodes:
                    store.bounds.learn(store, table[: used // size])
                slots.extend(table[i // size] * size + i % size for i in range(used, last))
                tables.append(table[: -(-last // size)])
            read = store.plan_read(list(dict.fromkeys(p for t in tables for p in t)))
            for s, table in zip(plan.spans, tables, strict=True):
                if read.compact is not None:
                    table = tuple(read.compact[p] for p in table)
                spans.append(AttentionSpan(s.n_new, s.used(g), table, s.positions, s.parents, s.decodes))
            reads.append(read)
            wheres.append(store.begin(torch.tensor(slots, device=self.device), positions))
            self._plans[g] = self.op.prepare(spans, self.shapes[g], self._plans[g])
        return reads, wheres
