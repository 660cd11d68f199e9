"""What ``panel.run()`` returns: one run as a person sees it, through every restart a changed recipe causes.

A change of the recipe ends the session's request and starts another one; whoever waits here waits for the run
of the last recipe. An interrupt while waiting stops the run and keeps what it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from workbench.spec.errors import Cancelled, JobFailed, WorkbenchError
from workbench.spec.run import Run
from workbench.widgets.waiting import wait_or_cancel


class PanelRun:
    """A run of the panel: wait for it, stop it, read its text and its :class:`Run`."""

    def __init__(self, stop: Callable[[PanelRun], None]) -> None:
        self._stop = stop
        self._ended = threading.Event()
        self._text: Callable[[], str] = lambda: ""
        self.state = "running"
        self.run: Run | None = None
        self.error: WorkbenchError | None = None
        self.restarts = 0

    @property
    def ended(self) -> bool:
        """True once the run is done, cancelled or failed."""
        return self._ended.is_set()

    @property
    def text(self) -> str:
        """Text of the first output so far."""
        return self.run.text if self.run is not None else self._text()

    def cancel(self) -> None:
        """Stop within one engine step; what was produced is kept."""
        self._stop(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False when ``timeout`` seconds passed first. An interrupt stops the run."""
        return wait_or_cancel(self._ended, self.cancel, timeout)

    def result(self, timeout: float | None = None) -> Run:
        """The finished run. Raises its error, :class:`Cancelled`, or ``TimeoutError``."""
        if not self.wait(timeout):
            raise TimeoutError(f"The run has not ended after {timeout} s.")
        if self.error is not None:
            raise self.error
        if self.run is None:
            raise Cancelled("The run was stopped before it began.")
        return self.run

    def __repr__(self) -> str:
        return f"<run: {self.state}, {len(self.text)} characters>"

    # -- called by the controller -------------------------------------------------------------------

    def follow(self, job: Any) -> None:
        """A request of the session works for this run now."""
        self._text = lambda: str(job.text)

    def end(self, state: str, run: Run | None, error: WorkbenchError | None = None) -> None:
        """The run is over; the first end counts."""
        if self.ended:
            return
        if state == "failed" and error is None:
            error = JobFailed("run", "The run failed.")
        self.state, self.run, self.error = state, run, error
        self._ended.set()
