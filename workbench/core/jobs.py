"""Jobs of a session: progress, cancellation, results; thread-safe for whoever waits on them.

Three classes: *live* (a newer one supersedes the one that waits), *request* (batched with others by the
engine) and *task* (queued, advanced in small units between engine steps: calibration, training, sweeps).
Every job ends in exactly one state, and an exception becomes its result, never a dead worker.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable
from typing import Any

from workbench.spec.errors import Cancelled, JobFailed, WorkbenchError
from workbench.spec.events import JobClass, JobEvent, JobState

_numbers = itertools.count(1)
ENDED: tuple[JobState, ...] = ("done", "cancelled", "superseded", "failed")


class CancelToken:
    """Asked at every engine step, and between layers of long work; setting it is all a cancel does."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Ask the work to stop; safe from any thread, any number of times."""
        self._event.set()

    def __call__(self) -> bool:
        return self._event.is_set()


class Job:
    """Something a session does for a caller."""

    def __init__(self, kind: JobClass, label: str, notify: Callable[[JobEvent], None]) -> None:
        self.id = f"{kind}-{next(_numbers)}"
        self.kind: JobClass = kind
        self.label = label
        self.token = CancelToken()
        self.state: JobState = "queued"
        self._notify = notify
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: WorkbenchError | None = None
        self._progress = (0.0, 0.0, "", "")

    @property
    def ended(self) -> bool:
        """True once the job is done, cancelled, superseded or failed."""
        return self._ended.is_set()

    @property
    def error(self) -> WorkbenchError | None:
        """Why it failed, if it did."""
        return self._error

    @property
    def value(self) -> Any:
        """What it produced so far; a cancelled job keeps its partial result."""
        return self._value

    def cancel(self) -> None:
        """Stop within one engine step (one layer in calibration); what was produced is kept."""
        self.token.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when ``timeout`` seconds passed first."""
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """The job's value. Raises its error, :class:`Cancelled`, or ``TimeoutError``.

        A keyboard interrupt while waiting cancels the job before it is raised.
        """
        try:
            ended = self.wait(timeout)
        except KeyboardInterrupt:
            self.cancel()
            self.wait(2.0)
            raise
        if not ended:
            raise TimeoutError(f"{self.label or self.id} is still running after {timeout} s.")
        if self._error is not None:
            raise self._error
        return self._value

    # -- called by the worker ---------------------------------------------------------------------

    def start(self) -> None:
        """The worker begins with it."""
        with self._lock:  # another thread may supersede it at this very moment
            if self.ended:
                return
            self.state = "running"
        self._emit()

    def progress(self, done: float, total: float, unit: str = "", message: str = "") -> None:
        """Report how far it is."""
        self._progress = (done, total, unit, message)
        self._emit()

    def finish(self, value: Any = None, state: JobState = "done") -> None:
        """End it with a value (a partial one when cancelled or superseded)."""
        self._end(state, value, None)

    def fail(self, error: BaseException) -> None:
        """End it with an error; the exception's frames are dropped so that no tensor stays alive."""
        if isinstance(error, WorkbenchError):
            _drop_frames(error)
            self._end("cancelled" if isinstance(error, Cancelled) else "failed", self._value, error)
            return
        text = "".join(traceback.format_exception(error, limit=-8))
        failed = JobFailed(type(error).__name__, str(error), traceback_text=text)
        _drop_frames(error)
        self._end("failed", self._value, failed)

    def _end(self, state: JobState, value: Any, error: WorkbenchError | None) -> None:
        with self._lock:
            if self.ended:
                return
            self._value, self._error, self.state = value, error, state
            self._ended.set()
        self._emit()

    def _emit(self) -> None:
        done, total, unit, message = self._progress
        error = self._error.to_dict() if self._error is not None else None
        self._notify(JobEvent(self.id, self.kind, self.state, self.label, done, total, unit, message, error))


def _drop_frames(error: BaseException) -> None:
    """Forget the frames of an exception and of those it came from: their locals hold tensors."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    error.__cause__ = error.__context__ = None
