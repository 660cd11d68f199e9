"""Needle retrieval: what a recipe or a KV method still recalls of its context, beside the plain engine.

The answer is scored teacher-forced: it is recalled when each of its tokens is the best one, which is what
greedy decoding would give; the margin is the log-probability of its token over the best other one, at the
worst token. Recipes run through their own engine. A codec's round trip acts on the exact context, and
question and answer are computed behind what it gave back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workbench.core.build import standalone_engine
from workbench.core.kv_methods import Method, checked, planned, prepare
from workbench.core.kv_p1 import filling, read_rows
from workbench.core.kv_runs import method_run
from workbench.core.kv_storage_methods import STORAGE, Bench
from workbench.core.needle import VALID, Needle, NeedleSettings, needles
from workbench.core.quality import held_out_text, quality_plans
from workbench.core.quality_scores import broken_plain
from workbench.core.quality_windows import QualitySettings
from workbench.engine.engine import Engine
from workbench.engine.score import score
from workbench.engine.sequence import Sequence as EngineSequence
from workbench.kv.cached import CachedRows
from workbench.spec.plan import Plan
from workbench.spec.recipe import Recipe
from workbench.spec.run import Metric, Run

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session

CHUNK = 64


@dataclass
class NeedleResult:
    """One method's needles: ``recalled``, ``margin`` (nats) and ``depth``; the same of the plain engine."""

    depth: list[float] = field(default_factory=list)
    recalled: list[bool] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)
    plain_recalled: list[bool] = field(default_factory=list)
    plain_margin: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        """Whether the plain engine recalls enough for the rest to mean anything."""
        return _mean(self.plain_recalled) >= VALID

    @property
    def verdict(self) -> str:
        """Why the result is not valid here, or nothing."""
        if self.valid:
            return ""
        share = f"{_mean(self.plain_recalled):.0%} of {len(self.plain_recalled)} needles"
        return f"not valid here: the plain model itself recalls {share}, below {VALID:.0%}"

    def metrics(self) -> list[Metric]:
        """Recall and margin, whole and by depth; each says when it is not valid."""
        n, note = len(self.recalled), self.verdict
        recall, plain = 100 * _mean(self.recalled), 100 * _mean(self.plain_recalled)
        out = [
            Metric("needle_recall", recall, "%", n=n, better="higher", note=note),
            Metric("needle_recall_plain", plain, "%", n=n, note=note or "plain engine"),
            Metric(
                "needle_margin",
                _mean(self.margin),
                "nats",
                n=n,
                spread=(min(self.margin), max(self.margin)),
                better="higher",
                note=note or "worst token of the answer over the best other token",
            ),
            Metric("needle_margin_plain", _mean(self.plain_margin), "nats", n=n, note=note or "plain engine"),
        ]
        for depth in sorted(set(self.depth)):
            at = [r for d, r in zip(self.depth, self.recalled, strict=True) if d == depth]
            name = f"needle_recall_{100 * depth:.0f}"
            out.append(Metric(name, 100 * _mean(at), "%", n=len(at), better="higher", note=note))
        if self.ratios:
            ratio = len(self.ratios) / sum(1 / r for r in self.ratios)
            out.append(
                Metric("whole_ratio", ratio, "×", n=n, better="higher", note="all rows, 16-bit KV = 1")
            )
        return out


def submit_needle(
    session: Session,
    methods: Mapping[str, Method],
    *,
    text: str | Path | None = None,
    settings: NeedleSettings | None = None,
) -> Job:
    """Queue needles for several methods; the job's result is a :class:`NeedleResult` by name.

    A recipe may be any that the engine runs (KV formats, selection, weights, …), or a codec for storage as in
    :func:`workbench.core.kv_methods.method`. Raises what ``submit_p1`` does; the job fails with
    :class:`RequestError` for a plain model that says nothing.
    """
    settings = settings or NeedleSettings()
    tokenizer = session.tokenizer
    asked = needles(tokenizer.encode, tokenizer.encode(held_out_text(text)), settings)
    longest = max(len(n.ids) for n in asked)
    sizes = QualitySettings(context=longest, score=1, greedy=0)

    def plan_of(recipe: Recipe) -> Plan:
        return quality_plans(session.plan, recipe, session.facts, sizes)[0]

    own = {name: plan_of(planned(m)) for name, m in methods.items() if isinstance(m, Recipe) and _runs(m)}
    coded = {name: m for name, m in methods.items() if name not in own}
    for made in coded.values():
        if isinstance(made, Recipe):
            plan_of(planned(checked(made)))
    plain = plan_of(Recipe())

    def work(job: Job, _: Engine) -> Generator[None, None, dict[str, NeedleResult]]:
        def told(done: float, what: str) -> None:
            job.progress(done, 1.0, "", what)

        decoder = session.decoder(plain, told, job.token)
        yield
        ready = prepare(coded, Bench(plain, decoder, told, job.token), plan_of)
        engine = standalone_engine(plain, decoder)
        trips = {name: made.trip for name, made in ready.items() if made.trip is not None}
        out = {name: NeedleResult() for name in methods}
        todo, done = len(asked) * (len(methods) + 1), 0
        plain_found: list[tuple[bool, float]] = []
        for needle in asked:
            job.progress(done, todo, "needles", "plain")
            context: list[CachedRows] = []
            plain_found.append(
                (yield from _asked(engine, needle, settings.aware, context if trips else None))
            )
            if math.isnan(plain_found[-1][1]):
                raise broken_plain()
            done += 1
            for name, trip in trips.items():
                job.progress(done, todo, "needles", name)
                with torch.inference_mode():
                    coded_rows = trip(context[0])
                fill = filling(engine, coded_rows.rows, context[0].tokens)
                found = yield from _asked(engine, needle, settings.aware, fill=fill)
                _add(out[name], needle, found, plain_found[-1])
                out[name].ratios.append(context[0].nbytes_16bit() / max(coded_rows.payload, 1))
                done += 1
        for name, plan in own.items():
            mine = standalone_engine(plan, session.decoder(plan, told, job.token))
            for needle, base in zip(asked, plain_found, strict=True):
                job.progress(done, todo, "needles", name)
                _add(out[name], needle, (yield from _asked(mine, needle, settings.aware)), base)
                done += 1
        return out

    return session.task(f"needles for {', '.join(methods)}", work)


def needle_run(
    plan: Plan, recipe: Recipe, result: NeedleResult, settings: NeedleSettings, profile: str
) -> Run:
    """The run of one method; a note says when it is not valid."""
    told = {"protocol": "needle", "needle": {**asdict(settings), "valid": result.valid}}
    run = method_run(plan, recipe, result.metrics(), told, profile)
    return run if result.valid else replace(run, notes=(*run.notes, result.verdict))


def _runs(recipe: Recipe) -> bool:
    return not any(u.id in STORAGE for u in recipe)


def _start(needle: Needle, aware: bool) -> int:
    """Where scoring begins: a selector acts one token before."""
    return len(needle.prompt) if aware else len(needle.context) + 1


def _asked(
    engine: Engine,
    needle: Needle,
    aware: bool,
    keep: list[CachedRows] | None = None,
    fill: Callable[[EngineSequence], None] | None = None,
) -> Generator[None, None, tuple[bool, float]]:
    """Whether an engine recalls, and its margin; ``keep`` takes the exact rows of what is coded."""
    # A selector acts one token before what is scored, and so does a codec.
    start = len(needle.prompt) if aware else len(needle.context) + 1
    rows: list[Tensor] = []
    for block in score(engine, needle.ids, start, CHUNK, fill):
        if block.logits is not None:
            rows.append(block.logits)
        elif keep is not None and block.sequence.computed == start - 1:
            with torch.inference_mode():
                keep.append(read_rows(engine, block.sequence, start - 1))
        yield
    return _judged(torch.cat(rows), needle)


def _judged(logits: Tensor, needle: Needle) -> tuple[bool, float]:
    """Of rows [n, V] that predict the answer's tokens, the last ones of ``logits``."""
    n = len(needle.answer)
    law = torch.log_softmax(logits[-n:].double(), -1)
    index = torch.tensor(needle.answer, device=law.device)[:, None]
    mine = law.gather(1, index)[:, 0]
    others = law.scatter(1, index, float("-inf")).amax(1)
    return bool((law.argmax(-1) == index[:, 0]).all()), float((mine - others).min())


def _add(out: NeedleResult, needle: Needle, found: tuple[bool, float], plain: tuple[bool, float]) -> None:
    out.depth.append(needle.depth)
    out.recalled.append(found[0])
    out.margin.append(found[1])
    out.plain_recalled.append(plain[0])
    out.plain_margin.append(plain[1])


def _mean(values: list[bool] | list[float]) -> float:
    return sum(values) / len(values)
