"""Saving the KV of a conversation to a file, and resuming from it in another process.

Saving computes what is no longer cached, codes the full pages and writes them; the few tokens behind the last
full page are computed again by whoever resumes. Resuming checks the file against the model, decodes it into
pages and publishes them: the next prompt that begins with these tokens finds them. What a lossy codec gave
back lives in a namespace of its own; only requests that pass the salt of the result are served from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from workbench.core.provenance import package_version
from workbench.core.saved_ends import ends_of, with_ends
from workbench.core.saved_file import SavedHeader, Shaped, check_place, read_saved, write_saved
from workbench.engine.at_rest import AtRest, Pages
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.seams import SpanPlan, StepPlan
from workbench.engine.sequence import Request
from workbench.engine.sequence import Sequence as EngineSequence
from workbench.models.progress import Cancel, Progress, part, report
from workbench.spec.errors import CapacityError, PayloadError, PromptTooLong, RequestError, UnknownToken
from workbench.spec.recipe import Use

PREFILL = 256  # rows computed between two looks at the cancel token
_ANY = ("attention", "numerics", "page_size", "kv_format", "selector", "storage", "drafter")
"""What may differ where a lossy codec's rows come back: they are only near to what was computed anyway."""
_WORDS = {
    "weights": "weights",
    "config": "configuration (layers, rotary embedding or context limit)",
    "method": "weight format",
    "dtype": "dtype",
    "kv_format": "KV format",
    "attention": "attention form",
    "selector": "KV selection",
    "storage": "KV at rest",
    "drafter": "drafter",
    "numerics": "numerics",
    "page_size": "page size",
}


@dataclass(frozen=True)
class Saved:
    """A file that was written: of ``tokens`` ids the first ``cached`` have their KV in it."""

    path: str
    codec: str
    lossy: bool
    tokens: int
    cached: int
    file_bytes: int
    kv_bytes: int
    drafter: str
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class Resumed:
    """``ids`` of the conversation; prompts that begin with them and pass ``salt`` find ``cached`` tokens."""

    ids: tuple[int, ...]
    cached: int
    salt: str
    lossy: bool
    codec: str
    drafter: str
    file_bytes: int
    seconds: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """JSON form; the ids as their number."""
        return {**asdict(self), "ids": len(self.ids)}


def shaped_by(engine: Engine, *, method: str, numerics: str, drafter: str = "") -> Shaped:
    """What shapes the rows that an engine caches; ``method`` names the weight format, ``drafter`` the use of
    one that keeps rows of its own."""
    decoder, kv, selector = engine.executor.decoder, engine.kv, engine.selecting.selector
    return Shaped(
        weights=decoder.weights.fingerprint,
        config=hashlib.blake2b(repr(decoder.config).encode(), digest_size=16).hexdigest(),
        method=method,
        dtype=str(kv.stores[0].geometry.dtype).removeprefix("torch."),
        kv_format=kv.stores[0].codec.key,
        attention=engine.executor.op.name,
        selector=selector.key if selector is not None else "",
        storage=kv.cold.tier.codec.key if kv.cold is not None else "",
        drafter=drafter,
        numerics=numerics,
        page_size=kv.page_size,
    )


def save_steps(
    engine: Engine,
    path: Path,
    ids: Sequence[int],
    codec: AtRest,
    use: Use,
    shaped: Shaped,
    *,
    model: str,
    salt: str = "",
    drafter: str = "",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Generator[None, None, Saved]:
    """Compute, code and write, one piece per ``yield``.

    Raises :class:`RequestError` for less than a page of tokens, ids the model does not have and more than its
    context limit, :class:`CapacityError` when the pool is too small, what the codec raises,
    :class:`StorageError` and ``Cancelled``; no file is left then.
    """
    size = engine.kv.page_size
    cached = len(ids) // size * size
    if not cached:
        raise RequestError(
            f"A conversation of {len(ids)} tokens fills no page of {size}: there is nothing to save.",
            hint="Computing it again is quicker; or choose smaller pages (paged:page_size).",
        )
    check_place(path)
    _check_ids(engine, ids)
    start = perf_counter()
    seq = _sequence(engine, ids[:cached], salt)
    yield from _admitted(engine, seq)
    try:
        ends = yield from _compute(engine, seq, part(progress, 0.0, 0.5))
        computed = perf_counter()
        pages = _pages(engine, seq)
        with torch.inference_mode():
            coded = codec.encode(pages, part(progress, 0.5, 0.9), cancel)
            coded = coded if codec.lossy else with_ends(coded, ends, cached // size)
        kv_bytes = _kv_bytes(engine, pages)
    finally:
        engine.drafting.forget(seq)
        engine.kv.release(seq)
    yield
    encoded = perf_counter()
    header = SavedHeader(
        model=model,
        shaped=shaped,
        codec=dict(use.to_json()),
        codec_key=codec.key,
        lossy=codec.lossy,
        tokens=len(ids),
        cached=cached,
        salt=salt,
        drafter=drafter,
        made_by=package_version("inference-workbench"),
        pages=dict(coded.header),
    )
    total = write_saved(path, header, list(ids), coded, part(progress, 0.9, 1.0), cancel)
    seconds = {"compute": computed - start, "code": encoded - computed, "write": perf_counter() - encoded}
    return Saved(str(path), use.to_text(), codec.lossy, len(ids), cached, total, kv_bytes, drafter, seconds)


def resume_steps(
    engine: Engine,
    path: Path,
    make: Callable[[dict[str, Any]], AtRest],
    shaped: Shaped,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Generator[None, None, Resumed]:
    """Read, decode and publish, one piece per ``yield``; ``make`` turns the header's use into its codec.

    Raises :class:`PayloadError` for a file that may not be restored here, :class:`CapacityError` when the
    pool is too small, ``Cancelled``; the cache is then as it was.
    """
    start = perf_counter()
    found: list[AtRest] = []

    def check(header: SavedHeader) -> int:
        _require_same(header, shaped)
        if header.cached > engine.context:
            raise PayloadError(
                f"It holds {header.cached:,} tokens; the context limit is {engine.context:,}.",
                hint="Raise the context limit (max_context).",
            )
        found.append(make(header.codec))
        if found[0].key != header.codec_key:
            raise PayloadError(
                f"It was coded by {header.codec_key!r}; the codec here is {found[0].key!r}.",
                hint="Use the release and calibration that wrote it, or save the conversation again.",
            )
        return 4 * header.tokens + _most_bytes(engine, header.cached) + (1 << 20)

    header, ids, coded = read_saved(path, check, engine.vocab_size)
    codec = found[0]
    file_bytes = coded.nbytes + 4 * len(ids)
    report(progress, 0.2, "file read and checked")
    yield
    read = perf_counter()
    salt = header.salt
    if header.lossy:
        salt += f"|{header.codec_key}/{_digest(header.shaped)}"
    seq = _sequence(engine, ids[: header.cached], salt, share=False)
    yield from _admitted(engine, seq)

    def fill() -> None:
        pages = _pages(engine, seq)
        codec.decode(coded, pages, part(progress, 0.2, 0.9), cancel)
        pages.settle()

    try:
        with torch.inference_mode():
            seq.ends = ends_of(coded, engine, header.cached // header.shaped.page_size)
            engine.kv.adopt(seq, header.cached, fill)
    finally:
        engine.kv.release(seq)
    report(progress, 1.0, "resumed")
    seconds = {"read": read - start, "decode": perf_counter() - read}
    name = Use.from_json(header.codec).to_text()
    return Resumed(tuple(ids), header.cached, salt, header.lossy, name, header.drafter, file_bytes, seconds)


def _digest(shaped: Shaped) -> str:
    return hashlib.blake2b(repr(shaped).encode(), digest_size=8).hexdigest()


def _require_same(header: SavedHeader, shaped: Shaped) -> None:
    """Raises :class:`PayloadError` naming what shaped the saved rows otherwise."""
    for field in fields(Shaped):
        own, here = getattr(header.shaped, field.name), getattr(shaped, field.name)
        if own != here and not (header.lossy and field.name in _ANY):
            raise PayloadError(
                f"It was saved with another {_WORDS[field.name]}: {_short(own)}, not {_short(here)}.",
                hint=f"It belongs to model {header.model!r}; resume with the recipe and model that saved it.",
            )


def _short(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= 40 else text[:12])


def _check_ids(engine: Engine, ids: Sequence[int]) -> None:
    bad = next((t for t in ids if not 0 <= t < engine.vocab_size), None)
    if bad is not None:
        raise UnknownToken(
            f"Token id {bad} is not in the vocabulary of {engine.vocab_size:,} tokens.",
            hint="Encode the conversation with this model's tokenizer.",
        )
    if len(ids) > engine.context:
        raise PromptTooLong(
            f"The conversation has {len(ids):,} tokens; the context limit is {engine.context:,}.",
            hint="Save less of it, or raise the context limit (max_context).",
        )


def _sequence(engine: Engine, ids: Sequence[int], salt: str, *, share: bool = True) -> EngineSequence:
    """A sequence that no scheduler knows; with ``share`` it takes what is cached of its beginning."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=None if share else 0)
    request = Request("saved-cache", tuple(ids), params, salt=salt)
    return EngineSequence(id=0, request=request, sample=0, tokens=list(ids), budget=0)


def _admitted(engine: Engine, seq: EngineSequence) -> Generator[None, None, None]:
    """Wait for pages while others run; raises :class:`CapacityError` when they will never be there."""
    kv, slots = engine.kv, len(seq.tokens)
    while True:
        with torch.inference_mode():
            if kv.pages_for(slots) <= kv.pages and kv.admit(seq, slots):
                return
        if not engine.has_work:
            raise CapacityError(
                f"A conversation of {slots} tokens needs {kv.pages_for(slots)} pages of {kv.page_size}; "
                f"the pool has {kv.pages}.",
                hint="Enlarge the KV pool (kv_pool_tokens).",
            )
        yield


def _compute(
    engine: Engine, seq: EngineSequence, progress: Progress | None
) -> Generator[None, None, dict[int, torch.Tensor]]:
    """Compute what is not cached yet, a block per ``yield``; gives what a drafter reads behind each page."""
    executor, end = engine.executor, len(seq.tokens)
    ends = engine.kv.ends.of(seq.chain)
    while seq.computed < end:
        begin = seq.computed
        n = min(PREFILL, end - begin, engine.scheduler.until_boundary(seq))
        span = SpanPlan(
            seq.id,
            tuple(seq.tokens[begin : begin + n]),
            tuple(range(begin, begin + n)),
            begin,
            tuple(map(tuple, seq.tables)),
            0,
        )
        with torch.inference_mode():
            engine.drafting.meet(seq)
            out = executor.forward(executor.prepare(StepPlan(0, (span,))), engine.drafting.features)
            # Pages are complete in a drafter's layers too.
            engine.drafting.before_commit(seq, begin, begin + n, range(n), out.captured)
            ends |= seq.ends
            engine.kv.commit(seq, begin + n)
            engine.drafting.after_commit(seq)
        report(progress, seq.computed / end, "computing the conversation")
        yield
    return ends


def _pages(engine: Engine, seq: EngineSequence) -> Pages:
    n = len(seq.tokens) // engine.kv.page_size
    return Pages(engine.kv.stores, engine.executor.groups, tuple(tuple(t[:n]) for t in seq.tables))


def _kv_bytes(engine: Engine, pages: Pages) -> int:
    """Bytes of the pages as the engine holds them, without those a window gave back."""
    total = 0
    for g, store in enumerate(pages.stores):
        held = sum(p.untyped_storage().nbytes() for p in store.planes.values())
        total += held * len(pages.present(g)) // (store.geometry.pages + 1)
    return total


def _most_bytes(engine: Engine, tokens: int) -> int:
    """Bytes that no way of storing so many tokens exceeds: twice their rows in float64."""
    per_token = sum(s.geometry.layers * s.geometry.kv_heads * s.geometry.head_dim for s in engine.kv.stores)
    return 2 * 2 * 8 * per_token * tokens
