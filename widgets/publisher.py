"""One coalescing publisher: many threads report changes, one shows the newest, at most 10 times a second.

Traits are set from here only. However fast events arrive, the front end gets the newest picture at a steady
rate, and whoever reports a change never waits for the front end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from time import monotonic

_log = logging.getLogger(__name__)
MAX_HZ = 10.0
_IDLE_SECONDS = 2.0


class Publisher:
    """Calls ``show`` after changes. Its thread exists only while there is something to show."""

    def __init__(self, show: Callable[[], None], max_hz: float = MAX_HZ) -> None:
        self._show = show
        self._period = 1.0 / max_hz
        self._changed = threading.Condition()
        self._marked = 0  # changes reported
        self._shown = 0  # changes on screen
        self._closed = False
        self._thread: threading.Thread | None = None
        self._last = 0.0
        self.failures = 0

    def mark(self) -> None:
        """Something changed; returns at once, from any thread."""
        with self._changed:
            if self._closed:
                return
            self._marked += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="workbench-publisher", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, timeout: float = 2.0) -> bool:
        """Wait until everything marked so far is shown; False when ``timeout`` seconds passed first."""
        if threading.current_thread() is self._thread:
            return False
        with self._changed:
            goal = self._marked
            return self._changed.wait_for(lambda: self._closed or self._shown >= goal, timeout)

    def close(self) -> None:
        """Show nothing more and end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(2.0)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._marked > self._shown or self._closed, _IDLE_SECONDS)
                rest = self._last + self._period - monotonic()
                if rest > 0 and self._marked > self._shown:
                    self._changed.wait_for(lambda: self._closed, rest)
                if self._closed or self._marked == self._shown:
                    self._thread = None
                    self._changed.notify_all()
                    return
                goal = self._marked
            try:
                self._show()
            except Exception:  # a broken picture must not end the publisher
                self.failures += 1
                _log.warning("A panel could not be drawn.", exc_info=True)
            with self._changed:
                self._last, self._shown = monotonic(), goal
                self._changed.notify_all()
