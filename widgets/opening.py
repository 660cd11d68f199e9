"""Another model, device or number format: a new session, made in a thread of its own while the old one stays.

Whether the model is there and fits the recipe is known before anything is loaded. Then the old session gives
its memory back, so that two models are never in it, and is given up once the new one has its weights. If that
fails or is stopped, the old session is still there: its next run loads its weights again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from workbench.spec.errors import Cancelled, JobFailed, WorkbenchError
from workbench.spec.events import Event, JobEvent
from workbench.widgets.waiting import wait_or_cancel

Done = Callable[["Opening", Any, "BaseException | None"], None]


class Opening:
    """A session on its way: wait for it, cancel it. ``state``: opening, done, cancelled or failed.

    ``make`` builds the session, not loaded yet; ``make_room`` frees the memory of the one before;
    ``done(self, session, error)`` takes the new one over or, with no session, says why; ``changed`` hears of
    progress. All are called in the opening's thread.
    """

    def __init__(
        self,
        label: str,
        make: Callable[[], Any],
        make_room: Callable[[], None],
        done: Done,
        changed: Callable[[], None],
    ) -> None:
        self.label, self.state, self.message = label, "opening", ""
        self.error: WorkbenchError | None = None
        self._make, self._make_room, self._done, self._changed = make, make_room, done, changed
        self._ended, self._cancelled = threading.Event(), threading.Event()
        self._job: Any = None
        self._thread = threading.Thread(target=self._work, name="workbench-open", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """True once the session is in place, or will not be."""
        return self._ended.is_set()

    @property
    def cancelled(self) -> bool:
        """True once somebody asked for it to stop."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop between two layers; the session before stays."""
        self._cancelled.set()
        if self._job is not None:
            self._job.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when ``timeout`` seconds passed first. An interrupt cancels."""
        return wait_or_cancel(self._ended, self.cancel, timeout)

    def result(self, timeout: float | None = None) -> None:
        """Wait until the session is in place. Raises what went wrong, or ``TimeoutError``."""
        if not self.wait(timeout):
            raise TimeoutError(f"{self.label} is not open after {timeout} s.")
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        return f"<open {self.label}: {self.state}>"

    def _work(self) -> None:
        session: Any = None
        try:
            self._check()
            session = self._make()
            self._check()
            self._make_room()
            session.listen(self._hear)
            self._job = session.apply(session.recipe)  # a job of one's own: its progress can be heard
            self._check()
            self._job.result()
            self._check()
        except BaseException as err:
            if session is not None:
                session.close()
            self._end(None, err)
        else:
            self._end(session, None)

    def _check(self) -> None:
        if self.cancelled:
            raise Cancelled(f"Opening {self.label} was stopped.")

    def _hear(self, event: Event) -> None:
        if isinstance(event, JobEvent) and event.kind == "live" and not self.ended:
            share = f" {event.done / event.total:.0%}" if event.total and event.done else ""
            self.message = f"{event.message}{share}".strip()
            self._changed()

    def _end(self, session: Any, error: BaseException | None) -> None:
        if error is None:
            self.state = "done"
        elif isinstance(error, WorkbenchError):
            self.error, self.state = error, "cancelled" if isinstance(error, Cancelled) else "failed"
        else:
            self.error, self.state = JobFailed(type(error).__name__, str(error)), "failed"
        try:
            self._done(self, session, error)
        finally:
            self._ended.set()
