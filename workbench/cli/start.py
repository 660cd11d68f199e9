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

CANCELLED = 130
MESSAGE = "The command was interrupted."
HINT = "Nothing is left running."


def main() -> int:
    """Run one command and return its exit status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as under nohup
        signal.signal(signal.SIGINT, _leave)
    from workbench.cli.main import main as run

    return run()


def _leave(*_: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be in the middle of a write, or its reader gone
            stream.flush()
    text = f"error: {MESSAGE}\n  → {HINT}\n"
    if "--json" in sys.argv:
        text = f'{{\n  "error": "Cancelled",\n  "message": "{MESSAGE}",\n  "hint": "{HINT}"\n}}\n'
    with contextlib.suppress(OSError):
        os.write(1 if "--json" in sys.argv else 2, text.encode())
    os._exit(CANCELLED)  # not an exception: the import it would be raised in might catch it
