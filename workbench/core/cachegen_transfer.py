"""A context stored in chunks, what each costs on this machine, and the cache that a transfer really leaves.

The link and its clock are simulated (:mod:`workbench.kv.cachegen.transfer`); bytes, seconds of decoding and
computing, and the restored keys and values are real. A chunk that came as text is computed on top of what
was restored before it, losses included, as a receiver would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workbench.core.kv_p1 import read_rows, write_rows
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.seams import SpanPlan, StepPlan
from workbench.engine.sequence import Request
from workbench.engine.sequence import Sequence as EngineSequence
from workbench.kv.cached import CachedRows
from workbench.kv.cachegen.codec import CacheGen
from workbench.kv.cachegen.context import CHUNK, cut, encode_context, join, spans
from workbench.kv.cachegen.levels import LEVELS, Level
from workbench.kv.cachegen.policy import TEXT, Offer
from workbench.models.progress import Cancel, Progress, check_cancel, part, report
from workbench.spec.errors import CapacityError, OptionError

ID_BYTES = 4  # a token of text is sent as its id


@dataclass(frozen=True)
class StoredContext:
    """``ids`` with their KV as payloads ``[chunk][level]``, and what each choice costs here."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    payloads: tuple[tuple[bytes, ...], ...]
    offers: tuple[Offer, ...]


def store_context(
    engine: Engine,
    codec: CacheGen,
    ids: Sequence[int],
    *,
    levels: Sequence[Level] = LEVELS,
    chunk: int = CHUNK,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> StoredContext:
    """Compute a context chunk by chunk, code every chunk at every level, and time computing and decoding.

    The engine must be idle and its KV uncompressed. Raises :class:`OptionError` for no tokens,
    :class:`CapacityError` when its pool is too small, and ``Cancelled`` between chunks or layers.
    """
    if not ids:
        raise OptionError("cachegen was given no tokens.", hint="A context has at least one.")
    cuts = spans(len(ids), chunk)
    rows: CachedRows | None = None
    compute: list[float] = []
    for i, (begin, end) in enumerate(cuts):
        check_cancel(cancel, "Computing a context")
        start = time.perf_counter()
        piece = compute_chunk(engine, ids, rows, begin, end)
        compute.append(time.perf_counter() - start)
        rows = piece if rows is None else join([rows, piece])
        report(progress, 0.3 * (i + 1) / len(cuts), "computing the context")
    if rows is None:
        raise OptionError("cachegen was given no tokens.")
    told = part(progress, 0.3, 0.8)
    payloads = encode_context(codec, rows, levels, chunk=chunk, progress=told, cancel=cancel)
    offers = []
    for i, ((begin, end), versions) in enumerate(zip(cuts, payloads, strict=True)):
        seconds = []
        for data in versions:
            check_cancel(cancel, "Timing the decoder")
            start = time.perf_counter()
            codec.decode(data)
            seconds.append(time.perf_counter() - start)
        offers.append(Offer(tuple(map(len, versions)), tuple(seconds), ID_BYTES * (end - begin), compute[i]))
        report(progress, 0.8 + 0.2 * (i + 1) / len(cuts), "timing the decoder")
    return StoredContext(tuple(ids), tuple(cuts), tuple(map(tuple, payloads)), tuple(offers))


def restore(
    engine: Engine,
    codec: CacheGen,
    stored: StoredContext,
    choices: Sequence[int],
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> CachedRows:
    """The cache that a transfer with these choices leaves: chunks decoded, or computed from their text.

    Raises :class:`OptionError` for another number of choices than chunks, or a level that is not stored;
    ``Cancelled`` between two chunks.
    """
    if len(choices) != len(stored.spans):
        raise OptionError(f"{len(choices)} choices were given for {len(stored.spans)} chunks.")
    rows: CachedRows | None = None
    for i, ((begin, end), choice) in enumerate(zip(stored.spans, choices, strict=True)):
        check_cancel(cancel, "Restoring a context")
        stored.offers[i].cost(choice)  # refuses levels that are not there
        if choice == TEXT:
            piece = compute_chunk(engine, stored.ids, rows, begin, end)
        else:
            piece = codec.decode(stored.payloads[i][choice])
        rows = piece if rows is None else join([rows, piece])
        report(progress, (i + 1) / len(choices), "restoring the context")
    if rows is None:
        raise OptionError("The stored context has no chunks.")
    return rows


def compute_chunk(
    engine: Engine, ids: Sequence[int], before: CachedRows | None, begin: int, end: int
) -> CachedRows:
    """Keys and values of tokens ``begin`` to ``end``, on top of the rows ``before`` them: one prefill chunk.

    Raises :class:`CapacityError` when the pool is too small.
    """
    request = Request("cachegen", tuple(ids[:end]), SamplingParams(max_tokens=0, prompt_logprobs=0))
    sequence = EngineSequence(id=0, request=request, sample=0, tokens=list(ids[:end]), budget=0)
    kv, executor = engine.kv, engine.executor
    with torch.inference_mode():
        if not kv.admit(sequence, end):
            raise CapacityError(
                f"A context of {end} tokens needs {kv.pages_for(end)} free pages of {kv.page_size}.",
                hint="Enlarge the KV pool (kv_pool_tokens) or use a shorter context.",
            )
        try:
            if before is not None:
                write_rows(engine, sequence, before)
            span = SpanPlan(
                sequence.id,
                tuple(ids[begin:end]),
                tuple(range(begin, end)),
                begin,
                tuple(map(tuple, sequence.tables)),
                0,
                None,
            )
            executor.forward(executor.prepare(StepPlan(0, (span,))))
            return cut(read_rows(engine, sequence, end), begin, end)
        finally:
            kv.release(sequence)
