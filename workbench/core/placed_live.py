"""A run at two places beside a session, to look at while it goes on: its drafter can be delayed, or killed.

The drafter's process belongs to the run and ends with it. What the target says is the plain run's, and it
goes on saying it when its drafter is gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from workbench.core.build import standalone_engine
from workbench.core.jobs import Job
from workbench.core.placed import setup_of
from workbench.core.placed_run import two_places
from workbench.core.plan import plan, require
from workbench.core.two_places import start_drafter
from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import OptionError
from workbench.spec.events import RequestEvent
from workbench.spec.recipe import Recipe
from workbench.speculative.placement.placed import PlacedDrafter
from workbench.speculative.placement.process_link import ProcessLink
from workbench.speculative.placement.trace import Trace

if TYPE_CHECKING:
    from workbench.core.session import Session


@dataclass(frozen=True)
class PlacedText:
    """What was said and when; ``warnings``: what happened to the drafter."""

    text: str
    token_ids: tuple[int, ...]
    trace: Trace
    warnings: tuple[str, ...]


@dataclass
class Watched:
    """A run that goes on. ``delay``: seconds that each message is held back from now on; any thread may
    change it. ``text``: what was said so far."""

    delay: float = 0.0
    text: str = ""
    link: ProcessLink | None = field(default=None, repr=False)
    job: Job | None = field(default=None, repr=False)

    @property
    def state(self) -> str:
        """In words: whether the drafter's process runs, and its number."""
        if self.link is None:
            return "the drafter's process has not started"
        return f"process {self.link.pid} drafts" if self.link.alive else "the drafter's process is gone"

    def kill(self) -> None:
        """End the drafter's process, as an accident would."""
        if self.link is not None:
            self.link.kill()

    def result(self, timeout: float | None = None) -> PlacedText:
        """Wait for the end."""
        if self.job is None:
            raise OptionError("Nothing runs.", hint="Start it first.")
        done: PlacedText = self.job.result(timeout)
        return done


def watch_two_places(
    session: Session,
    use: str,
    prompt: str,
    *,
    tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    delay: float = 0.0,
    changed: Callable[[], None] = lambda: None,
) -> Watched:
    """Start a run of ``use`` (``swiftspec`` or ``mirror_sd`` with options) as a task of the session.

    ``changed`` is called after every step, on the session's thread. Raises :class:`PlanError` for a use that
    does not fit, and :class:`OptionError` for one whose drafter has no process.
    """
    where = session.plan
    made = require(
        plan(
            Recipe.of(use), session.facts, dtype=where.dtype, numerics=where.numerics, device=where.device,
            limits=where.limits,
        )
    )  # fmt: skip
    watched = Watched(delay)
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
    request = Request("watched", tuple(session.tokenizer.encode(prompt)), params)

    def work(job: Job, _: Engine) -> Generator[None, None, PlacedText]:
        decoder = session.decoder(made, lambda f, what: None, job.token)
        engine = standalone_engine(made, decoder)
        drafter = engine.drafting.drafter
        if not isinstance(drafter, PlacedDrafter) or drafter.wanted.where != "process":
            raise OptionError(f"{use} has no process of its own.", hint="Choose swiftspec or mirror_sd.")
        engine.make_stream = session.tokenizer.stream
        with start_drafter(setup_of(made, drafter.wanted), cancel=job.token) as link:
            link.to_drafter = link.to_target = lambda: watched.delay
            drafter.place(link, itertools.count(1))
            watched.link = link
            steps = two_places(engine, link, [request])
            said: list[RequestEvent] = []
            while True:
                try:
                    said += next(steps)
                except StopIteration as end:
                    done = end.value
                    break
                watched.text = "".join(e.text for e in said)
                changed()
                yield
        changed()
        warnings = tuple(w for step in done.steps for w in step.warnings)
        title = f"{drafter.name} in two processes"
        return PlacedText(watched.text, tuple(done.ids(request.id)), done.trace(title), warnings)

    watched.job = session.task(f"{use} in two processes", work)
    return watched
