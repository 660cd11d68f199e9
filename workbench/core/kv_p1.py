"""Protocol P1: what a KV format does to the tokens that read its cache, and nothing else.

The context's exact keys and values are coded and decoded; the tokens after it are scored teacher-forced
against the result, their own keys and values exact. So formats that attention reads and codecs for storage
stand on one scale, and a method costs one pass over the scored tokens: the context is computed once.
Ratios are to 16-bit KV: of the coded rows (*codec ratio*), and of all rows with those kept exact.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.core.build import kv_codec, standalone_engine
from workbench.core.quality import held_out_text, quality_plans
from workbench.core.quality_scores import WindowScores, quality_metrics
from workbench.core.quality_windows import QualitySettings, Window, cut
from workbench.engine.engine import Engine
from workbench.engine.score import score
from workbench.engine.sequence import Sequence as EngineSequence
from workbench.kv.cached import CachedRows, Reconstructed, RoundTrip, page_format
from workbench.spec.errors import RequestError
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session

Tell = Callable[[float, float, str], None]


def submit_p1(
    session: Session,
    methods: Mapping[str, RoundTrip | Recipe],
    *,
    text: str | Path | None = None,
    ids: Sequence[int] | None = None,
    settings: QualitySettings | None = None,
) -> Job:
    """Queue the measurement of several methods; the job's result is a :class:`MethodResult` by name.

    A recipe stands for its KV format; ``text`` and ``ids`` are those of ``submit_quality``. Raises
    :class:`PlanError` or :class:`RequestError` at once for what cannot be used.
    """
    settings = settings or QualitySettings(greedy=0)
    windows = cut(ids if ids is not None else session.tokenizer.encode(held_out_text(text)), settings)
    plans = {
        name: quality_plans(session.plan, method, session.facts, settings)[0]
        for name, method in methods.items()
        if isinstance(method, Recipe)
    }
    _, plain = quality_plans(session.plan, Recipe(), session.facts, settings)

    def work(job: Job, _: Engine) -> Generator[None, None, dict[str, MethodResult]]:
        def told(done: float, what: str) -> None:
            job.progress(done, 1.0, "", what)

        decoder = session.decoder(plain, told, job.token)
        engine = standalone_engine(plain, decoder)
        trips: dict[str, RoundTrip] = {}
        for name, method in methods.items():
            if isinstance(method, Recipe):
                trips[name] = page_format(
                    kv_codec(plans[name], decoder, told, job.token), plans[name].page_size
                )
            else:
                trips[name] = method
            yield
        result = yield from p1_steps(
            engine,
            windows,
            trips,
            settings,
            lambda done, total, what: job.progress(done, total, "windows", what),
        )
        return result

    return session.task(f"P1 of {', '.join(methods)}", work)


@dataclass
class MethodResult:
    """What came of one method: a window's scores each, and its bytes."""

    windows: list[WindowScores] = field(default_factory=list)
    payload: int = 0
    coded: int = 0
    sixteen: int = 0
    coded_sixteen: int = 0

    def metrics(self) -> list[Metric]:
        """Quality against exact KV, and both ratios."""
        out = quality_metrics(self.windows)
        n = len(self.windows)
        if self.coded:
            ratio = self.coded_sixteen / self.coded
            out.append(
                Metric("codec_ratio", ratio, "×", n=n, better="higher", note="coded rows, 16-bit KV = 1")
            )
        if self.payload:
            ratio = self.sixteen / self.payload
            out.append(
                Metric("whole_ratio", ratio, "×", n=n, better="higher", note="all rows, 16-bit KV = 1")
            )
        return out


def p1_steps(
    engine: Engine,
    windows: Sequence[Window],
    methods: Mapping[str, RoundTrip],
    settings: QualitySettings,
    tell: Tell,
) -> Generator[None, None, dict[str, MethodResult]]:
    """Measure every method on every window with an idle plain engine, one forward per ``yield``."""
    results = {name: MethodResult() for name in methods}
    for i, window in enumerate(windows):
        tell(i, len(windows), "exact KV")
        exact: list[Tensor] = []
        rows: CachedRows | None = None
        for block in score(engine, window.ids, window.start, settings.chunk):
            if block.logits is not None:
                exact.append(block.logits)
            elif block.sequence.computed == window.start - 1:
                # Now, not later: pages behind a window are given back as the scored tokens move on.
                with torch.inference_mode():
                    rows = read_rows(engine, block.sequence, window.start - 1)
            yield
        expected = torch.cat(exact)
        if rows is None:
            raise RequestError("P1 needs a context of two tokens or more.", hint="Raise context.")
        for j, (name, method) in enumerate(methods.items()):
            tell(i + (j + 1) / (len(methods) + 1), len(windows), name)
            with torch.inference_mode():
                found = method(rows)
            results[name].windows.append((yield from _scored(engine, window, found, expected, settings)))
            _count(results[name], rows, found)
    return results


def _scored(
    engine: Engine, window: Window, found: Reconstructed, expected: Tensor, settings: QualitySettings
) -> Generator[None, None, WindowScores]:
    out = WindowScores()

    def fill(sequence: EngineSequence) -> None:
        write_rows(engine, sequence, found.rows)

    for block in score(engine, window.ids, window.start, settings.chunk, fill):
        if block.logits is not None:
            first = block.begin + 1 - window.start
            with torch.inference_mode():
                out.add(block.logits, expected[first : first + block.n], block.targets)
        yield
    return out


def read_rows(engine: Engine, sequence: EngineSequence, tokens: int) -> CachedRows:
    """The first ``tokens`` rows of a sequence's cache, of an engine with uncompressed KV."""
    config = engine.executor.decoder.config
    k: list[Tensor] = [torch.empty(0)] * config.num_layers
    v = list(k)
    for store, table, group in zip(engine.kv.stores, sequence.tables, config.kv_groups, strict=True):
        pages = torch.tensor(table, device=store.geometry.device)
        for local, layer in enumerate(group.layers):
            for name, out in (("k", k), ("v", v)):
                plane = store.planes[name][local].index_select(0, pages)  # [n, H, P, D]
                out[layer] = plane.transpose(1, 2).flatten(0, 1)[:tokens].clone()
    return CachedRows(tuple(k), tuple(v), torch.arange(tokens))


def write_rows(engine: Engine, sequence: EngineSequence, rows: CachedRows) -> None:
    """Write rows to the first slots of a sequence, as a step would."""
    size = engine.kv.page_size
    config = engine.executor.decoder.config
    for store, table, group in zip(engine.kv.stores, sequence.tables, config.kv_groups, strict=True):
        device = store.geometry.device
        index = torch.arange(rows.tokens, device=device)
        slots = torch.tensor(table, device=device)[index // size] * size + index % size
        where = store.begin(slots, rows.positions.to(device))
        for local, layer in enumerate(group.layers):
            store.write(local, where, rows.k[layer], rows.v[layer])


def _count(result: MethodResult, rows: CachedRows, found: Reconstructed) -> None:
    sixteen = rows.nbytes_16bit()
    exempt = sixteen * found.exempt // max(rows.tokens, 1)
    result.sixteen += sixteen
    result.payload += found.payload
    result.coded_sixteen += sixteen - exempt
    result.coded += found.payload - exempt
