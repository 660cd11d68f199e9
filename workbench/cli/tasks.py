"""A session of a command that measures: its meter, its Ctrl-C, and the job that is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workbench.cli.output import Meter, interruptible
from workbench.cli.start import HINT, MESSAGE
from workbench.spec.errors import Cancelled
from workbench.spec.events import Event, JobEvent
from workbench.spec.plan import EngineLimits
from workbench.spec.recipe import Recipe

if TYPE_CHECKING:
    from workbench.core.jobs import Job
    from workbench.core.session import Session

SMALL_POOL = EngineLimits(kv_pool_tokens=64, max_sequences=1, max_context=64)
"""For sessions that only measure: a measurement has a pool of its own."""


@contextmanager
def working(
    title: str, model: str, recipe: Recipe | None = None, **where: Any
) -> Iterator[tuple[Session, Callable[[Job], Any]]]:
    """A session, and the function that waits for one of its jobs and gives the result.

    Progress of tasks is shown; the first Ctrl-C raises :class:`Cancelled` within a step.
    """
    from workbench.core.session import Session

    with Meter(title) as meter, Session(model, recipe, **where) as session, interruptible() as cancel:

        def listen(event: Event) -> None:
            if isinstance(event, JobEvent) and event.kind == "task" and event.total:
                meter(event.done / event.total, event.message)

        session.listen(listen)
        yield session, lambda job: finished(job, cancel)


def finished(job: Job, cancel: threading.Event) -> Any:
    """A job's result. Raises :class:`Cancelled` once ``cancel`` is set; closing the session ends the job."""
    while not job.wait(0.05):
        if cancel.is_set():
            raise Cancelled(MESSAGE, hint=HINT)
    return job.result()
