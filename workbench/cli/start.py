"""Where the ``workbench`` command begins: from here on, Ctrl-C ends it with status 130.

Imports take a moment, and an interrupt raised inside one may be swallowed or leave a traceback. Nothing that
could be lost exists by then, so the process just ends. A command that has something to keep takes the signal
over: :func:`workbench.cli.output.interruptible`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass

CANCELLED = 130
MESSAGE = "The command was interrupted."
HINT = "Nothing is left running."


@dataclass
class _Answer:
    """How far the one object of ``--json`` is, and whether it was interrupted meanwhile."""

    begun: bool = False
    ended: bool = False
    interrupted: bool = False


_answer = _Answer()


def main() -> int:
    """Run one command and return its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, _leave)
    from workbench.cli.main import main as run

    return run()


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """While the one object of ``--json`` is written: Ctrl-C waits for its end, and no other object follows.

    A second Ctrl-C does not wait: the reader may have stopped reading.
    """
    _answer.begun = True
    try:
        yield
    finally:
        _answer.ended = True
    if _answer.interrupted:
        _leave()


def _leave(*_: object) -> None:
    if _answer.begun and not _answer.ended and not _answer.interrupted:
        _answer.interrupted = True
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be in the middle of a write, or its reader gone
            stream.flush()
    text = f"error: {MESSAGE}\n  → {HINT}\n"
    if "--json" in sys.argv:
        text = f'{{\n  "error": "Cancelled",\n  "message": "{MESSAGE}",\n  "hint": "{HINT}"\n}}\n'
    if not _answer.begun:
        with contextlib.suppress(OSError):
            os.write(1 if "--json" in sys.argv else 2, text.encode())
    os._exit(CANCELLED)  # not an exception: the import it would be raised in might catch it
