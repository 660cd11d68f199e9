"""Executes a :class:`StepPlan`: plain data in, logits out. Every rank of a parallel engine runs this.

Index work is done once per KV group and step; the layers then only write K/V and attend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.engine.seams import AttentionOp, AttentionShape, AttentionSpan, StepPlan
from workbench.engine.store import PageStore, ReadPlan
from workbench.models.decoder import Decoder


@dataclass(frozen=True)
class StepOutput:
    """Logits [R, V] and ``hidden`` [R, H] of the rows asked for; ``offsets[i]`` is span ``i``'s first."""

    logits: Tensor
    offsets: tuple[int, ...]
    hidden: Tensor
    captured: dict[int, Tensor]


@dataclass(frozen=True)
class Prepared:
    """Tensors of one step: ids and positions [T], rows that need logits, K/V reads and writes per group."""

    ids: Tensor
    positions: Tensor
    rows: Tensor | None
    offsets: tuple[int, ...]
    reads: list[ReadPlan]
    wheres: list[Tensor]


class Executor:
    """One model, its page stores (one per KV group) and an attention op."""

    def __init__(self, decoder: Decoder, stores: list[PageStore], op: AttentionOp) -> None:
        config = decoder.config
        self.decoder = decoder
        self.stores = stores
        self.op = op
        self.device = stores[0].geometry.device
        self._page_size = stores[0].geometry.page_size
        self._shapes = [
            AttentionShape(
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                page_size=self._page_size,
                window=group.window,
                soft_cap=config.attn_softcap,
            )
            for group in config.kv_groups
        ]
        self._home = {
            layer: (g, i) for g, kv in enumerate(config.kv_groups) for i, layer in enumerate(kv.layers)
        }
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

    def forward(self, step: Prepared, capture: tuple[int, ...] = ()) -> StepOutput:
        """Run the model over a prepared step: writes K/V, attends, returns the logits asked for."""
        stores, plans, op, home = self.stores, self._plans, self.op, self._home
        reads, wheres = step.reads, step.wheres

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group, local = home[layer]
            store = stores[group]
            store.write(local, wheres[group], k, v)
            keys, values = store.read(local, reads[group])
            return op.run(plans[group], q, keys, values)

        out = self.decoder.forward(step.ids, step.positions, attend, logits_rows=step.rows, capture=capture)
        if self.device.type == "cuda":  # its time belongs to this phase
            torch.cuda.synchronize(self.device)
        return StepOutput(out.logits, step.offsets, out.hidden, dict(out.captured))

    def _begin(self, plan: StepPlan, positions: Tensor) -> tuple[list[ReadPlan], list[Tensor]]:
        """Slots to write, pages to read and the attention plan of every KV group."""
        size = self._page_size
        reads, wheres = [], []
        for g, store in enumerate(self.stores):
            slots: list[int] = []
            spans: list[AttentionSpan] = []
            tables: list[tuple[int, ...]] = []
            for s in plan.spans:
                table = s.tables[g]
                last = s.start + s.n_new
                slots.extend(table[i // size] * size + i % size for i in range(s.start, last))
                tables.append(table[: -(-last // size)])
            read = store.plan_read(list(dict.fromkeys(p for t in tables for p in t)))
            for s, table in zip(plan.spans, tables, strict=True):
                if read.compact is not None:
                    table = tuple(read.compact[p] for p in table)
                spans.append(AttentionSpan(s.n_new, s.start, table, s.positions, s.parents))
            reads.append(read)
            wheres.append(store.begin(torch.tensor(slots, device=self.device), positions))
            self._plans[g] = self.op.prepare(spans, self._shapes[g], self._plans[g])
        return reads, wheres
