"""Progress and cancellation of long model work (download, conversion, weight building).

Both are plain callables, so that a script, a job queue and a notebook can each pass what they
have: ``threading.Event().is_set`` is a cancel token.
"""

from __future__ import annotations

from collections.abc import Callable

from workbench.spec.errors import Cancelled

Progress = Callable[[float, str], None]
"""``progress(fraction, what)``: fraction of the whole work done, 0 to 1, and what is being done now."""

Cancel = Callable[[], bool]
"""Returns true once the work should stop."""


def report(progress: Progress | None, fraction: float, what: str) -> None:
    """Tell ``progress``, if anyone listens."""
    if progress is not None:
        progress(min(max(fraction, 0.0), 1.0), what)


def check_cancel(cancel: Cancel | None, what: str) -> None:
    """Raise ``Cancelled`` once ``cancel()`` is true."""
    if cancel is not None and cancel():
        raise Cancelled(f"{what} was cancelled.", hint="Start it again; what was finished is kept.")


def part(progress: Progress | None, start: float, end: float) -> Progress | None:
    """The sub-range ``[start, end]`` of ``progress`` as a progress of its own."""
    if progress is None:
        return None
    return lambda fraction, what: progress(start + (end - start) * fraction, what)
