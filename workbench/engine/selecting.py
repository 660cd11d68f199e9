"""KV selection in the engine: when a sequence's cache is thinned out, what the selector is shown, what moves.

A selector acts at positions it names beforehand, after a commit, in the KV groups that see all keys. It is
shown committed tokens only, so rejected drafts leave no trace in it; what it keeps is compacted into private
pages. Blocks are cut at its selections, so that chunks, batches and drafts never change what is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from workbench.engine.compaction import Rows
from workbench.engine.executor import Executor, Part
from workbench.engine.kv import KVCache
from workbench.engine.seams import SpanPlan
from workbench.engine.selection import CachedLayer, KVSelector
from workbench.engine.sequence import Sequence as EngineSequence
from workbench.models.rope import frequencies, turn
from workbench.spec.errors import InvariantError

FAR = 1 << 60


class Selecting:
    """A selector, or none, at work on the sequences of an engine."""

    def __init__(self, selector: KVSelector | None, kv: KVCache, executor: Executor) -> None:
        self.selector = selector
        self._kv, self._parts = kv, executor.parts
        groups = executor.groups
        self._groups = {g for g, group in enumerate(groups) if group.window is None}
        self._layers = [layer for layer in executor.parts if executor.parts[layer][0].group in self._groups]
        self._frequencies: Tensor | None = None
        if selector is not None and selector.rerotates and self._layers:
            config = executor.decoder.config
            spec = dict(config.rope)[config.layer_types[self._layers[0]]]
            self._frequencies = frequencies(spec, config.head_dim, config.max_position)

    # -- before a step --------------------------------------------------------------------------------

    def begin(self, seq: EngineSequence) -> None:
        """A sequence is new: how much of it a prefix index may give without hiding what must be seen."""
        point = self._next(seq, 0)
        if self.selector is None or point is None:
            return
        history = self.selector.history
        seq.shareable = 0 if history is None else max(0, point - max(1, history))

    def left(self, seq: EngineSequence) -> int:
        """Tokens a block may have until the next selection."""
        point = self._next(seq, seq.computed)
        return FAR if point is None else point - seq.computed

    def wants(self, spans: Iterable[tuple[EngineSequence, SpanPlan]]) -> bool:
        """Whether the selector must see queries of a step."""
        return any(self._seen_from(seq, span.start) < span.start + span.n_new for seq, span in spans)

    # -- after a commit -------------------------------------------------------------------------------

    def commit(
        self, seq: EngineSequence, start: int, rows: Sequence[int], queries: Mapping[int, Tensor]
    ) -> bool:
        """Tokens ``start`` to ``seq.computed`` are committed; theirs are ``rows`` of ``queries`` [T, Hq, D].

        False when a selection found no pages for what it keeps: the sequence has lost its pages. Raises
        :class:`RequestError` for keys and values that cannot be judged.
        """
        selector, point = self.selector, self._next(seq, start)
        if selector is None or point is None:
            return True
        if seq.selection is None:
            seq.selection = selector.begin(*_lengths(seq))
        first = max(start, self._seen_from(seq, start))
        if first < seq.computed:
            self._observe(seq, first, [rows[i - start] for i in range(first, seq.computed)], queries)
        return seq.computed < point or self._select(seq)

    def acts(self, seq: EngineSequence, start: int) -> bool:
        """Whether the tokens committed from ``start`` on end where the selector acts."""
        return self._next(seq, start) == seq.computed

    def nbytes(self, running: Iterable[EngineSequence]) -> int:
        """Bytes of statistics, and of the positions of kept tokens."""
        held = sum(s.selection.nbytes() for s in running if s.selection is not None)
        return held + sum(t.nbytes for s in running for heads in s.kept.values() for t in heads)

    # -- inside -----------------------------------------------------------------------------------------

    def _next(self, seq: EngineSequence, at: int) -> int | None:
        return self.selector.next(at, *_lengths(seq)) if self.selector is not None else None

    def _seen_from(self, seq: EngineSequence, at: int) -> int:
        """The first token after ``at`` whose query the selector must see."""
        selector, point = self.selector, self._next(seq, at)
        if selector is None or point is None or selector.history == 0:
            return FAR
        return at if selector.history is None else point - selector.history

    def _observe(
        self, seq: EngineSequence, first: int, rows: list[int], queries: Mapping[int, Tensor]
    ) -> None:
        if seq.selection is None:
            return
        positions = torch.arange(first, seq.computed)
        for layer in self._layers:
            asked = queries[layer]
            own = asked.index_select(0, torch.tensor(rows, device=asked.device))
            seq.selection.observe(layer, own, positions, partial(self._cached, seq, layer))

    def _cached(self, seq: EngineSequence, layer: int) -> CachedLayer:
        """What attention reads of a sequence in one layer."""
        sides: list[list[Tensor]] = [[], []]
        positions: list[Tensor] = []
        for part in self._parts[layer]:
            store, used = self._kv.stores[part.group], seq.used(part.group)
            table = seq.tables[part.group][: -(-used // self._kv.page_size)]
            read = store.plan_read(table)
            where = torch.tensor(
                table if read.compact is None else [read.compact[p] for p in table],
                device=store.geometry.device,
            )
            for out, pages in zip(sides, store.read(part.local, read), strict=True):
                rows = pages.index_select(0, where).transpose(0, 1)  # [H, n, P, D]
                out.append(rows.flatten(1, 2)[:, :used].contiguous())
            positions += self._positions(seq, layer, part)
        k, v = (torch.cat(side) for side in sides)
        return CachedLayer(k, v, torch.stack(positions))

    def _positions(self, seq: EngineSequence, layer: int, part: Part) -> list[Tensor]:
        """The token in each slot of a layer's KV heads, int64 [S] each."""
        out = []
        used = seq.used(part.group)
        for head in range(part.heads.start, part.heads.stop):
            old = seq.kept[layer][head].long() if seq.kept else torch.empty(0, dtype=torch.int64)
            new = torch.arange(seq.computed - (used - len(old)), seq.computed)
            out.append(torch.cat([old, new]))
        return out

    def _select(self, seq: EngineSequence) -> bool:
        selector, selection = self.selector, seq.selection
        if selector is None or selection is None:
            return True
        chosen: dict[int, dict[tuple[int, int], Tensor]] = {g: {} for g in self._groups}
        kept: dict[int, list[Tensor]] = {}
        for layer in self._layers:
            cached = self._cached(seq, layer)
            slots = selection.keep(layer, cached)
            _check(selector.name, layer, slots, cached)
            kept[layer] = [p[s].to(torch.int32) for p, s in zip(cached.positions, slots, strict=True)]
            for part in self._parts[layer]:
                for i, head in enumerate(range(part.heads.start, part.heads.stop)):
                    chosen[part.group][part.local, i] = slots[head]
        keep: dict[int, Tensor] = {}
        for g, by_head in chosen.items():
            counts = {len(s) for s in by_head.values()}
            if len(counts) != 1:
                raise InvariantError(
                    f"{selector.name} keeps {sorted(counts)} tokens in heads that share pages."
                )
            heads = 1 + max(head for _, head in by_head)
            keep[g] = torch.stack([by_head[key] for key in sorted(by_head)]).view(-1, heads, *counts)
        if all(slots.shape[-1] == seq.used(g) for g, slots in keep.items()):
            return True  # nothing is dropped
        if not self._kv.compact(seq, keep, self._turn if selector.rerotates else None):
            return False
        seq.kept, seq.selected = kept, seq.computed
        if selector.rerotates:
            seq.shift = max(seq.dropped)
        return True

    def _turn(self, rows: Rows, keep: Tensor) -> None:
        """Give kept keys consecutive positions: the one in slot ``keep[..., j]`` moves to position ``j``."""
        if self._frequencies is not None:
            rows["k"] = turn(rows["k"], torch.arange(keep.shape[-1]) - keep, self._frequencies)


def _lengths(seq: EngineSequence) -> tuple[int, int]:
    """Prompt and context, in tokens."""
    prompt, context = seq.prompt_len, seq.request.context
    return prompt, prompt if context is None else context


def _check(name: str, layer: int, slots: Sequence[Tensor], cached: CachedLayer) -> None:
    """Raise :class:`InvariantError` unless each KV head keeps at least one slot, in order, all in use."""
    heads, used = cached.positions.shape
    for s in slots:
        if len(s) == 0 or int(s[0]) < 0 or int(s[-1]) >= used or bool((s[1:] <= s[:-1]).any()):
            raise InvariantError(f"{name} keeps slots of layer {layer} that are not in order within {used}.")
    if len(slots) != heads:
        raise InvariantError(f"{name} answers for {len(slots)} of {heads} KV heads in layer {layer}.")
