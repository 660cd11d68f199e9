"""Where results and everything else go: results to stdout, all that moves or warns to stderr.

With ``--json`` stdout carries one JSON object. Strict JSON has no NaN, so numbers that are not finite become
null. Progress is a bar on a terminal and, elsewhere, a line now and then once the work takes longer.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from workbench.cli.start import answering

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

QUIET_SECONDS = 2.0
"""Off a terminal, nothing is said of work that takes less, and then a line this often."""


def out() -> Console:
    """The console of results; as wide as the terminal, and wide when there is none."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 140, highlight=False)


def err() -> Console:
    """The console of progress, notices and errors."""
    from rich.console import Console

    return Console(file=sys.stderr, width=None if sys.stderr.isatty() else 140, highlight=False)


def note(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr, flush=True)


def plain(value: object) -> Any:
    """``value`` as strict JSON data: tuples become lists, keys text, numbers that are not finite null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def print_json(data: Mapping[str, Any]) -> None:
    """The command's one JSON object."""
    text = json.dumps(plain(data), indent=2, ensure_ascii=True, allow_nan=False)
    stdout = _stdout()
    with answering():
        for start in range(0, len(text), _WHOLE):
            stdout.write(text[start : start + _WHOLE])
        stdout.write("\n")
        stdout.flush()


_WHOLE = 4096
"""Bytes that a pipe takes whole (PIPE_BUF). Of more, a signal may cut a write short, and unbuffered text
(PYTHONUNBUFFERED) would lose the rest."""

_kept_stdout: list[Any] = []


def _stdout() -> Any:
    return _kept_stdout[-1] if _kept_stdout else sys.stdout


@contextlib.contextmanager
def only_json(active: bool) -> Iterator[None]:
    """While active, whatever any library prints goes to stderr; :func:`print_json` still reaches stdout."""
    if not active:
        yield
        return
    _kept_stdout.append(sys.stdout)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        _kept_stdout.pop()


class Meter:
    """Progress of one piece of work on stderr; ``meter(fraction, what)`` may be called from any thread."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._began = self._said = time.monotonic()
        self._bar: Progress | None = None
        self._task: Any = None
        self._lock = threading.Lock()

    def __call__(self, fraction: float, what: str = "") -> None:
        with self._lock:
            if sys.stderr.isatty():
                self._draw(fraction, what)
            elif time.monotonic() - self._said >= QUIET_SECONDS:
                self._said = time.monotonic()
                note(f"{self.title}: {100 * fraction:3.0f}% {what}")

    def _draw(self, fraction: float, what: str) -> None:
        if self._bar is None:
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f}%"))
            self._bar = Progress(*columns, TimeElapsedColumn(), console=err(), transient=True)
            self._task = self._bar.add_task(self.title, total=1.0)
            self._bar.start()
        self._bar.update(self._task, completed=fraction, description=f"{self.title} {what}".strip())

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets, so that work ends where it is safe; the second ends it at once.

    Where interrupts are ignored, as under nohup, they stay so.
    """
    wanted = threading.Event()

    def on_interrupt(*_: object) -> None:
        if wanted.is_set():
            raise KeyboardInterrupt
        wanted.set()
        note("cancelling; press Ctrl-C again to stop at once")

    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield wanted
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield wanted
    finally:
        signal.signal(signal.SIGINT, before)


def size(count: float) -> str:
    """Bytes for a person, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"
