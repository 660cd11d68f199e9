"""One calibration text with its exact KV, and what its scored tokens say once one layer of it is coded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from workbench.engine.executor import Executor
from workbench.engine.seams import AttentionOp, PageGeometry, SpanPlan, StepPlan
from workbench.engine.store import PageStore
from workbench.kv.plain import PlainCodec
from workbench.kv.xquant.codec import XQuantCodec
from workbench.kv.xquant.schedule import Side
from workbench.models.decoder import Decoder


class Trials:
    """``ids`` on an uncompressed cache: the first ``context`` of them, whole pages, are what is coded.

    ``exact``: log-probabilities float64 [n, V] of the scored tokens on exact keys and values.
    """

    def __init__(
        self, decoder: Decoder, op: AttentionOp, codec: XQuantCodec, ids: Sequence[int], context: int
    ) -> None:
        config, weights = decoder.config, decoder.weights
        page = codec.residual
        self._codec = codec
        self._behind = tuple(ids[context:])
        self._context = context
        self._pages = context // page
        total = -(-len(ids) // page)
        plain = PlainCodec(weights.dtype)
        self._home: dict[int, tuple[PageStore, int]] = {}
        stores = []
        for group in config.kv_groups:
            geometry = PageGeometry(
                layers=len(group.layers),
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                page_size=page,
                pages=total,
                dtype=weights.dtype,
                device=weights.device,
            )
            stores.append(PageStore(plain, plain, geometry, group.layers))
            self._home |= {layer: (stores[-1], i) for i, layer in enumerate(group.layers)}
        self._one = replace(stores[0].geometry, layers=1, pages=self._pages)
        self._tables = (tuple(range(1, total + 1)),) * len(stores)
        self._executor = Executor(decoder, stores, op)
        self._forward(ids[:context], 0, 1)
        self.exact = self._scored()

    def score(self, side: int, layer: int, owner: int | None) -> Tensor:
        """As ``exact``, with a layer's keys (side 0) or values (1) coded: its own codes, or ``owner``'s."""
        store, local = self._home[layer]
        plane = store.planes["kv"[side]][local]
        before = plane.clone()
        with torch.inference_mode():
            plane[1 : self._pages + 1] = self._coded(layer, owner)[side]
        try:
            return self._scored()
        finally:
            plane.copy_(before)

    def codes(self, layer: int, like: int) -> tuple[Tensor, Tensor]:
        """A layer's own codes of the context at the widths of layer ``like``: uint8 [n, Hkv, P, D] each."""
        return self._bound(like, None).codes(*self._rows(layer))

    def _coded(self, layer: int, owner: int | None) -> tuple[Tensor, Tensor]:
        where = torch.arange(self._pages, device=self._one.device)
        own = self._bound(owner if owner is not None else layer, None)
        planes = {
            p.name: torch.zeros((self._pages, *p.shape), dtype=p.dtype, device=self._one.device)
            for p in own.planes(self._one)
        }
        if owner is not None:
            own.encode(planes, where, *self._rows(owner))
            own = self._bound(owner, owner)
        k, v = self._rows(layer)
        own.encode(planes, where, k, v)
        out = torch.empty_like(k), torch.empty_like(v)
        own.decode(planes, where, *out)
        return out

    def _bound(self, layer: int, owner: int | None) -> XQuantCodec:
        """The codec at the widths of a layer, both sides with their own codes or with those of ``owner``."""
        base = self._codec.base
        k, v = (Side(s[layer].bits, owner) for s in (base.keys, base.values))
        return replace(self._codec, k=k, v=v)

    def _rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the context, [n, Hkv, P, D], as they were computed."""
        store, local = self._home[layer]
        k, v = (store.planes[n][local, 1 : self._pages + 1] for n in "kv")
        return k, v

    def _scored(self) -> Tensor:
        return self._forward(self._behind, self._context, len(self._behind)).double().log_softmax(-1)

    def _forward(self, tokens: Sequence[int], start: int, logits: int) -> Tensor:
        positions = tuple(range(start, start + len(tokens)))
        span = SpanPlan(0, tuple(tokens), positions, start, self._tables, logits)
        with torch.inference_mode():
            return self._executor.forward(self._executor.prepare(StepPlan(0, (span,)))).logits
