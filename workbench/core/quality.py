"""Quality of a recipe against the plain engine of the same weights, measured on held-out text.

Both engines are teacher-forced over the same windows (:mod:`workbench.core.quality_windows`), each through
its own weights, KV codec and attention; then both continue each context greedily until they part. It runs
as a task of a session, one forward at a time, so requests of the same session are served in between and a
cancel takes effect within a step.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.core.build import standalone_engine
from workbench.core.plan import ModelFacts, plan, require
from workbench.core.provenance import provenance
from workbench.core.quality_run import quality_run, quality_steps
from workbench.core.quality_windows import QualitySettings, cut
from workbench.core.texts import shipped_text
from workbench.models.registry import origin
from workbench.spec.errors import RequestError
from workbench.spec.plan import EngineLimits, Plan
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session
    from workbench.engine.engine import Engine

MAX_TEXT_BYTES = 64 * 1024 * 1024


def submit_quality(
    session: Session,
    recipe: Recipe | None = None,
    *,
    text: str | Path | None = None,
    ids: Sequence[int] | None = None,
    settings: QualitySettings | None = None,
) -> Job:
    """Queue a measurement of ``recipe`` (the session's own by default); the job's result is a :class:`Run`.

    ``text`` is text or the path of a UTF-8 file; ``ids`` are token ids instead; neither: the shipped
    evaluation text. Raises :class:`PlanError`, :class:`OptionError` or :class:`RequestError` at once when the
    recipe, the settings or the text cannot be used.
    """
    settings = settings or QualitySettings()
    if ids is None:
        ids = session.tokenizer.encode(held_out_text(text))
    windows = cut(ids, settings)
    lengths = [len(session.tokenizer.decode(w.scored, skip_special=False).encode()) for w in windows]
    mine, plain = quality_plans(session.plan, recipe or session.recipe, session.facts, settings)
    grid = origin(session.facts.name).get("weight_note")  # says when the weights were quantized before
    notes = (str(grid),) if grid else ()

    def work(job: Job, _: Engine) -> Generator[None, None, Run]:
        def build(p: Plan) -> Engine:
            decoder = session.decoder(p, lambda f, what: job.progress(f, 1.0, "", what), job.token)
            return standalone_engine(p, decoder)

        def tell(done: float, total: float, message: str) -> None:
            job.progress(done, total, "windows", message)

        engine = build(mine)
        yield
        result = yield from quality_steps(engine, build(plain), windows, settings, tell, lengths)
        return replace(
            quality_run(mine, engine, settings, result, notes),
            provenance=provenance(mine.device, session.profile),
        )

    return session.task(f"quality of {mine.recipe}", work)


def measure_quality(
    session: Session,
    recipe: Recipe | None = None,
    *,
    text: str | Path | None = None,
    ids: Sequence[int] | None = None,
    settings: QualitySettings | None = None,
) -> Run:
    """:func:`submit_quality`, waited for."""
    run: Run = submit_quality(session, recipe, text=text, ids=ids, settings=settings).result()
    return run


def held_out_text(text: str | Path | None = None) -> str:
    """``text``, the content of a file, or the shipped evaluation text; raises :class:`RequestError`."""
    if text is None:
        return shipped_text("evaluation")
    if isinstance(text, str):
        return text
    path = text
    try:
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise RequestError(f"{path} has more than {MAX_TEXT_BYTES:,} bytes.", hint="Give a shorter text.")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise RequestError(f"{path} cannot be read as UTF-8 text: {err}.") from None


def quality_plans(
    base: Plan, recipe: Recipe, facts: ModelFacts, settings: QualitySettings
) -> tuple[Plan, Plan]:
    """Plans of the recipe and of the plain engine, alike in dtype, numerics, device and sizes.

    Raises :class:`PlanError` when the recipe does not fit, :class:`RequestError` when a window is longer than
    the model's context.
    """
    if settings.slots > facts.config.max_position:
        raise RequestError(
            f"A window needs {settings.slots} positions; the model has {facts.config.max_position}.",
            hint="Use a smaller context or score.",
        )
    limits = EngineLimits(kv_pool_tokens=settings.slots, max_sequences=1, max_context=settings.slots)

    def of(which: Recipe) -> Plan:
        where = {"device": base.device, "dtype": base.dtype, "numerics": base.numerics}
        return require(plan(which, facts, limits=limits, **where))  # type: ignore[arg-type]

    return of(recipe), of(Recipe())
