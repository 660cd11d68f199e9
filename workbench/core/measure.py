"""Measuring from a script: quality, KV methods by P1, needles, sweeps, drafters. Each returns runs to keep.

``from workbench import measure``; ``session`` is an open :class:`Session`, or the name of a model, for which
one is opened with 32-bit arithmetic and closed again. Nothing of it needs a notebook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workbench.core.drafters.bench import run_drafters
from workbench.core.drafters.settings import DrafterSettings
from workbench.core.jobs import Job
from workbench.core.kv_methods import Method, grid, method
from workbench.core.kv_p1 import submit_p1, that_fit
from workbench.core.kv_points import Points
from workbench.core.kv_runs import RatePoint, frontier, p1_run
from workbench.core.needle import NeedleSettings
from workbench.core.needle_run import needle_run, submit_needle
from workbench.core.quality import measure_quality
from workbench.core.quality_windows import QualitySettings
from workbench.core.session import Session
from workbench.spec.events import Event, JobEvent
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe
from workbench.spec.run import Run

__all__ = [
    "NeedleSettings",
    "Points",
    "QualitySettings",
    "RatePoint",
    "drafters",
    "frontier",
    "grid",
    "method",
    "needle",
    "p1",
    "quality",
    "sweep",
]

Tell = Callable[[float, str], None]


def quality(session: Session | str, recipe: Recipe | None = None, **asked: Any) -> Run:
    """Perplexity, KL and agreement of a recipe, through its own engine; keywords of ``submit_quality``."""
    with opened(session) as here:
        return measure_quality(here, recipe, **asked)


def p1(
    session: Session | str,
    *methods: str | Recipe,
    text: str | Path | None = None,
    ids: Sequence[int] | None = None,
    settings: QualitySettings | None = None,
    points: Points | None = None,
    tell: Tell = lambda fraction, what: None,
) -> list[Run]:
    """Protocol P1 of several methods (``"kivi:bits=2"``, ``"kvtc:ratio=16"``), a run each, in order.

    ``text`` and ``ids`` are those of ``submit_quality``; what ``points`` has is not measured again. Raises
    what :func:`workbench.core.kv_methods.method` and ``submit_p1`` do; an interrupt cancels.
    """
    settings = settings or QualitySettings(greedy=0)
    named = {str(m): m if isinstance(m, Recipe) else method(m) for m in methods}
    with opened(session) as here:
        job = submit_p1(here, dict(named), text=text, ids=ids, settings=settings, points=points)
        found = _result(here, job, tell)
        return [p1_run(here.plan, named[n], r, settings, here.profile) for n, r in found.items()]


def needle(
    session: Session | str,
    *methods: str | Recipe,
    text: str | Path | None = None,
    settings: NeedleSettings | None = None,
    tell: Tell = lambda fraction, what: None,
) -> list[Run]:
    """Whether a number hidden in a context is recalled, by several methods or recipes; a run each.

    A run whose ``plan["needle"]["valid"]`` is false says nothing of its method: the plain model does not
    recall either. Raises what ``submit_needle`` does; an interrupt cancels.
    """
    settings = settings or NeedleSettings()
    named = {str(m): m if isinstance(m, Recipe) else method(m) for m in methods}
    with opened(session) as here:
        job = submit_needle(here, dict(named), text=text, settings=settings)
        found = _result(here, job, tell)
        return [needle_run(here.plan, named[n], r, settings, here.profile) for n, r in found.items()]


def sweep(session: Session | str, techniques: Sequence[str] = (), **asked: Any) -> list[Run]:
    """Every point of the curves of ``techniques`` (none: of all), by P1; keywords of :func:`p1`.

    Methods that do not fit the model are left out.
    Points are kept in the cache folder, so that a sweep that was stopped goes on where it was.
    """
    asked.setdefault("points", Points())
    asked.setdefault("settings", QualitySettings(greedy=0))
    named: dict[str, Method] = {str(m): m for m in grid(techniques)}
    with opened(session) as here:
        fit, _ = that_fit(here, named, asked["settings"])
        return p1(here, *fit, **asked)


def drafters(
    model: str, *recipes: str | Recipe, tell: Tell = lambda fraction, what: None, **asked: Any
) -> Run:
    """Drafters (``"eagle3:depth=3"``; none: all that run here) against plain decoding, on real prompts.

    ``asked`` are fields of :class:`workbench.core.drafters.settings.DrafterSettings`. Turns are kept in the
    cache folder: stopped, the same call goes on. Raises what ``drafter_steps`` does.
    """
    named = tuple(r if isinstance(r, Recipe) else Recipe.of(*r.split("+")) for r in recipes)
    settings = DrafterSettings(model, named, **asked)
    return run_drafters(settings, lambda done, total, what: tell(done / total if total else 0.0, what))


@contextmanager
def opened(session: Session | str) -> Iterator[Session]:
    """The session itself, or one of a model that is closed at the end."""
    if isinstance(session, Session):
        yield session
        return
    limits = EngineLimits(kv_pool_tokens=64, max_sequences=1, max_context=64)  # measuring has its own pool
    with Session(session, dtype="float32", limits=limits) as made:
        yield made


def _result(session: Session, job: Job, tell: Tell) -> Any:
    def listen(event: Event) -> None:
        if isinstance(event, JobEvent) and event.job_id == job.id and event.total:
            tell(event.done / event.total, event.message)

    stop = session.listen(listen)
    try:
        return job.result()
    finally:
        stop()
