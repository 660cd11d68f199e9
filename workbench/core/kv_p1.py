"""Protocol P1: what a KV format does to the tokens that read its cache, and nothing else.

The context's exact keys and values are coded and decoded; the tokens after it are scored teacher-forced
against the result, their own keys and values exact. So formats that attention reads and codecs for storage
stand on one scale, and a method costs one pass over the scored tokens: the context is computed once.
Ratios are to 16-bit KV: of the coded rows (*codec ratio*), and of all rows with those kept exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.core.build import standalone_engine
from workbench.core.build_weights import weights_key
from workbench.core.kv_methods import Method, checked, planned, prepare
from workbench.core.kv_points import Points, point_key, window_part
from workbench.core.kv_prepared import Prepared, prepared
from workbench.core.kv_result import MethodResult, WindowResult, parameters_of
from workbench.core.kv_storage_methods import Bench
from workbench.core.quality import held_out_text, quality_plans
from workbench.core.quality_scores import WindowScores
from workbench.core.quality_windows import QualitySettings, Window, cut
from workbench.engine.engine import Engine
from workbench.engine.score import Scored, score
from workbench.engine.sequence import Sequence as EngineSequence
from workbench.kv.cached import CachedRows, RoundTrip
from workbench.spec.errors import InvariantError, PlanError, RequestError
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session

Tell = Callable[[float, float, str], None]


def submit_p1(
    session: Session,
    methods: Mapping[str, Method],
    *,
    text: str | Path | None = None,
    ids: Sequence[int] | None = None,
    settings: QualitySettings | None = None,
    points: Points | None = None,
) -> Job:
    """Queue the measurement of several methods; the job's result is a :class:`MethodResult` by name.

    A recipe is a KV format, a codec for storage, or that behind the other
    (:func:`workbench.core.kv_methods.method`); ``text`` and ``ids`` are those of ``submit_quality``. What
    ``points`` has is not measured again, and what is measured is kept there. Raises :class:`PlanError`,
    :class:`RecipeError` or :class:`RequestError` at once for what cannot be used.
    """
    settings = settings or QualitySettings(greedy=0)
    windows = cut(ids if ids is not None else session.tokenizer.encode(held_out_text(text)), settings)

    def plan_of(recipe: Recipe) -> Plan:
        return quality_plans(session.plan, recipe, session.facts, settings)[0]

    for made in methods.values():
        if isinstance(made, Recipe):
            plan_of(planned(checked(made)))
    plain = plan_of(Recipe())

    def work(job: Job, _: Engine) -> Generator[None, None, dict[str, MethodResult]]:
        def told(done: float, what: str) -> None:
            job.progress(done, 1.0, "", what)

        def tell(done: float, total: float, what: str) -> None:
            job.progress(done, total, "windows", what)

        decoder = session.decoder(plain, told, job.token)
        yield
        bench = Bench(plain, decoder, told, job.token)
        ready = prepare(methods, bench, plan_of)
        yield
        about = point_key(
            decoder.weights.fingerprint,
            decoder.config,
            weights_key(plain),
            settings.chunk,
            torch.get_num_threads(),
        )
        engine = standalone_engine(plain, decoder)
        result = yield from p1_steps(engine, windows, ready, settings, tell, points, about)
        for found in result.values():
            found.parameters = parameters_of(decoder)
        return result

    return session.task(f"P1 of {', '.join(methods)}", work)


def that_fit(
    session: Session, methods: Mapping[str, Method], settings: QualitySettings
) -> tuple[dict[str, Method], tuple[str, ...]]:
    """The methods that fit the session's model, and a sentence for each that does not."""
    fit: dict[str, Method] = {}
    left_out = []
    for name, made in methods.items():
        try:
            if isinstance(made, Recipe):
                quality_plans(session.plan, planned(checked(made)), session.facts, settings)
        except PlanError as error:
            left_out.append(f"{name} is left out: {'; '.join(map(str, error.conflicts))}")
        else:
            fit[name] = made
    return fit, tuple(left_out)


def p1_steps(
    engine: Engine,
    windows: Sequence[Window],
    methods: Mapping[str, RoundTrip | Prepared],
    settings: QualitySettings,
    tell: Tell,
    points: Points | None = None,
    about: str = "",
) -> Generator[None, None, dict[str, MethodResult]]:
    """Measure every method on every window with an idle plain engine, one forward per ``yield``.

    ``about`` names the engine in the keys of ``points``.
    """
    made = {name: prepared(m) for name, m in methods.items()}
    results = {name: MethodResult(shared=m.shared) for name, m in made.items()}
    for i, window in enumerate(windows):
        part = window_part(window.ids, window.start)
        keys = {name: point_key("p1/1", about, part, m.key) for name, m in made.items() if m.key}
        found = {name: points.get(key) for name, key in keys.items()} if points is not None else {}
        missing = {name: m for name, m in made.items() if found.get(name) is None}
        if missing:
            tell(i, len(windows), "exact KV")
            context = yield from _exact(engine, window, settings)
        for j, (name, method) in enumerate(missing.items()):
            tell(i + (j + 1) / (len(missing) + 1), len(windows), name)
            one = yield from _measured(engine, window, method, context, settings)
            found[name] = one
            if points is not None and name in keys:
                points.put(keys[name], one)
        for name, out in results.items():
            out.results += [r for r in (found[name],) if r is not None]
    return results


def _exact(
    engine: Engine, window: Window, settings: QualitySettings
) -> Generator[None, None, tuple[CachedRows, Tensor]]:
    """Exact keys and values of the context, and the logits of what follows it."""
    logits: list[Tensor] = []
    rows: CachedRows | None = None
    for block in score(engine, window.ids, window.start, settings.chunk):
        if block.logits is not None:
            logits.append(block.logits)
        elif block.sequence.computed == window.start - 1:
            # Now, not later: pages behind a window are given back as the scored tokens move on.
            with torch.inference_mode():
                rows = read_rows(engine, block.sequence, window.start - 1)
        yield
    if rows is None:
        raise RequestError("P1 needs a context of two tokens or more.", hint="Raise context.")
    return rows, torch.cat(logits)


def _measured(
    engine: Engine,
    window: Window,
    method: Prepared,
    context: tuple[CachedRows, Tensor],
    settings: QualitySettings,
) -> Generator[None, None, WindowResult]:
    rows, expected = context
    scores, first = WindowScores(), window.start - 1

    def add(block: Scored) -> None:
        if block.logits is not None:
            at = block.begin - first
            with torch.inference_mode():
                scores.add(block.logits, expected[at : at + block.n], block.targets)

    if method.engine is not None:
        with torch.inference_mode():
            own = method.engine()
        payload = 0
        for block in score(own, window.ids, window.start, settings.chunk):
            if block.sequence.computed == first:
                payload = held_16bit(own, block.sequence)
            add(block)
            yield
        sixteen = rows.nbytes_16bit()
        return WindowResult(scores, rows.tokens, sixteen, payload, sixteen, payload)
    if method.trip is None:
        raise InvariantError("A KV method has neither a round trip nor an engine.")
    if method.clock is not None:
        method.clock.take()
    with torch.inference_mode():
        found = method.trip(rows)
    seconds = method.clock.take() if method.clock is not None else None
    for block in score(engine, window.ids, window.start, settings.chunk, filling(engine, found.rows, first)):
        add(block)
        yield
    return WindowResult.of(scores, rows, found, seconds)


def filling(engine: Engine, rows: CachedRows, context: int) -> Callable[[EngineSequence], None]:
    """Gives a sequence of ``context`` tokens these rows as its cache; there may be fewer, in their order."""

    def fill(sequence: EngineSequence) -> None:
        write_rows(engine, sequence, rows)
        if rows.tokens < context:
            sequence.dropped = [context - rows.tokens] * len(engine.kv.stores)

    return fill


def held_16bit(engine: Engine, sequence: EngineSequence) -> int:
    """Bytes of a sequence's cache as its format stores it, plain rows in 16 bits, and of kept positions."""
    held = engine.kv.nbytes([sequence])
    geometry = engine.kv.stores[0].geometry
    payload = held["kv_payload"]
    if engine.kv.stores[0].codec.in_place:
        payload = payload * 2 // geometry.dtype.itemsize
    return payload + sum(t.nbytes for heads in sequence.kept.values() for t in heads)


def read_rows(engine: Engine, sequence: EngineSequence, tokens: int) -> CachedRows:
    """The first ``tokens`` rows of a sequence's cache, of an engine with uncompressed KV."""
    config = engine.executor.decoder.config
    k: list[Tensor] = [torch.empty(0)] * config.num_layers
    v = list(k)
    for store, table, group in zip(engine.kv.stores, sequence.tables, engine.executor.groups, strict=True):
        pages = torch.tensor(table, device=store.geometry.device)
        for local, layer in enumerate(group.layers):
            for name, out in (("k", k), ("v", v)):
                plane = store.planes[name][local].index_select(0, pages)  # [n, H, P, D]
                out[layer] = plane.transpose(1, 2).flatten(0, 1)[:tokens].clone()
    return CachedRows(tuple(k), tuple(v), torch.arange(tokens))


def write_rows(engine: Engine, sequence: EngineSequence, rows: CachedRows) -> None:
    """Write rows to the first slots of a sequence, as a step would."""
    size = engine.kv.page_size
    for store, table, group in zip(engine.kv.stores, sequence.tables, engine.executor.groups, strict=True):
        device = store.geometry.device
        index = torch.arange(rows.tokens, device=device)
        slots = torch.tensor(table, device=device)[index // size] * size + index % size
        where = store.begin(slots, rows.positions.to(device))
        for local, layer in enumerate(group.layers):
            store.write(local, where, rows.k[layer], rows.v[layer])
