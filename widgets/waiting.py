"""Waiting in a cell for something that runs elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable

_GRACE = 2.0  # seconds a cancelled piece of work has to end before the interrupt goes on


def wait_or_cancel(ended: threading.Event, cancel: Callable[[], None], timeout: float | None) -> bool:
    """Wait for ``ended``; False when ``timeout`` seconds passed first. An interrupt cancels the work."""
    try:
        return ended.wait(timeout)
    except KeyboardInterrupt:
        cancel()
        ended.wait(_GRACE)
        raise
