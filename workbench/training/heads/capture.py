"""Hidden states of a model on given texts: teacher-forced through the engine's own executor.

What a head is shown at run time is what it is trained on: the residual streams entering the layers it asks
for, from the same kernels, many texts in one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workbench.engine.executor import Executor
from workbench.engine.seams import AttentionOp, PageGeometry, SpanPlan, StepPlan
from workbench.engine.store import PageStore
from workbench.kv.plain import PlainCodec
from workbench.models.decoder import Decoder

ROWS = 4096
"""Tokens per step at most, unless one text alone is longer."""


def capture(
    decoder: Decoder,
    op: AttentionOp,
    texts: Sequence[Sequence[int]],
    layers: Sequence[int],
    page_size: int = 64,
) -> Iterator[list[Tensor]]:
    """Streams [n, H] of every text, one per layer of ``layers``, in order.

    Layer ``i`` is the stream that enters it, ``num_layers`` the one that leaves the last.
    """
    for batch in _batches(texts):
        yield from _run(decoder, op, batch, tuple(layers), page_size)


def _batches(texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    for text in texts:
        if batch and sum(map(len, batch)) + len(text) > ROWS:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def _run(
    decoder: Decoder, op: AttentionOp, texts: list[Sequence[int]], layers: tuple[int, ...], page_size: int
) -> list[list[Tensor]]:
    config, dtype = decoder.config, decoder.weights.dtype
    needed = [-(-len(text) // page_size) for text in texts]
    firsts = [1 + sum(needed[:i]) for i in range(len(texts))]
    stores = [
        PageStore(
            PlainCodec(dtype),
            PlainCodec(dtype),
            PageGeometry(
                layers=len(group.layers),
                kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                page_size=page_size,
                pages=sum(needed),
                dtype=dtype,
                device=decoder.weights.device,
            ),
            group.layers,
        )
        for group in config.kv_groups
    ]
    spans = tuple(
        SpanPlan(
            seq=i,
            tokens=tuple(text),
            positions=tuple(range(len(text))),
            start=0,
            tables=(tuple(range(first, first + pages)),) * len(stores),
            logits=1,
        )
        for i, (text, first, pages) in enumerate(zip(texts, firsts, needed, strict=True))
    )
    executor = Executor(decoder, stores, op)
    with torch.inference_mode():
        out = executor.forward(executor.prepare(StepPlan(0, spans)), layers)
    pieces = [torch.split(out.captured[layer], [len(t) for t in texts]) for layer in layers]
    return [[piece[i] for piece in pieces] for i in range(len(texts))]
