"""The target's end of a drafter in a process of its own: lines of JSON on two pipes.

Nothing here waits for the drafter unless it is asked to, and nothing raises into the engine: a drafter that
was killed or talks nonsense is a link that is not alive, one that hangs says nothing: decoding goes on. The
process never outlives this one: it ends with its pipe (``process_inbox``), with :meth:`ProcessLink.close`, at
exit.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import IO

from workbench.models.progress import Cancel
from workbench.spec.errors import Cancelled, JobFailed, PayloadError
from workbench.speculative.placement.messages import Close, Message, Ready, Worked, from_line, to_line

Delay = Callable[[], float]
"""Seconds that the next message is held back, for tests of slow links."""

KEPT = 1 << 16
"""Batches of the drafter's that are remembered."""
GRACE = 2.0
"""Seconds that a process is given to end by itself, and then to end when told."""


class ProcessLink:
    """Runs ``code`` (fixed text of this package) in an interpreter like this, ``setup`` its first line.

    Its one argument is the number of this process.
    ``to_drafter`` and ``to_target`` hold messages back, in order. ``worked``: what the drafter says it did.
    """

    def __init__(
        self,
        code: str,
        setup: str,
        *,
        to_drafter: Delay | None = None,
        to_target: Delay | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.worked: deque[Worked] = deque(maxlen=KEPT)
        self.traffic: deque[tuple[float, str]] = deque(maxlen=KEPT)  # when, and what: sent, or received
        self.ready: Ready | None = None
        self.broken = ""  # why nobody listens any more, where it is known
        self.to_drafter, self.to_target = to_drafter, to_target
        self._came: queue.Queue[Message | None] = queue.Queue()
        self._out: queue.Queue[str | None] = queue.Queue()
        self._complaints: deque[str] = deque(maxlen=50)
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, fixed code
            [sys.executable, "-c", code, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env={**os.environ, **(environment or {})},
            process_group=0,  # what interrupts this one, in a terminal or a notebook, is not for it
        )
        self._end = weakref.finalize(self, _end, self._process)  # also at exit
        process, out = self._process, self._out
        # The threads hold no reference to the link: one that is forgotten ends its process.
        me = weakref.proxy(self)
        for target, args in (
            (_write, (process.stdin, out, me)),
            (_read, (process.stdout, self._came, me)),
            (_drain, (process.stderr, self._complaints)),
        ):
            self._last = threading.Thread(target=target, args=args, daemon=True)
            self._last.start()
        self._out.put(setup)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs and its pipes are whole."""
        return not self.broken and self._process.poll() is None

    def clock(self) -> float:
        """The system's."""
        return time.monotonic()

    def nbytes(self) -> int:
        """Weights and KV of the drafter, as it last said."""
        weights = self.ready.nbytes if self.ready is not None else 0
        return (weights + (self.worked[-1].held if self.worked else 0)) if self.alive else 0

    def wait_ready(self, timeout: float, cancel: Cancel = lambda: False) -> Ready:
        """Wait for its model. Raises :class:`JobFailed` when it does not come, and :class:`Cancelled`."""
        until = time.monotonic() + timeout
        while self.ready is None:
            if cancel():
                self.close()
                raise Cancelled("The start of the drafter's process was cancelled.")
            left = until - time.monotonic()
            if left <= 0 or (not self.alive and self._came.empty()):
                why = self.broken or ("it was not ready in time" if left <= 0 else "it ended")
                self.close()
                self._last.join(GRACE)  # what it complained about has come
                raise JobFailed("Drafter", why, traceback_text="".join(self._complaints)[-2000:])
            self._take(min(left, 0.2))
        return self.ready

    def send(self, message: Message) -> None:
        """Say something; lost when nobody listens."""
        if self.alive:
            self.traffic.append((time.monotonic(), type(message).__name__))
            self._out.put(to_line(message))

    def poll(self, wait: float = 0.0) -> list[Message]:
        """What has come; waits up to ``wait`` seconds for the first that is not about the process itself."""
        until = time.monotonic() + wait
        got = self._take(0.0)
        while not got and self.alive and (left := until - time.monotonic()) > 0:
            got = self._take(left)
        return got

    def kill(self) -> None:
        """End the process at once, as an accident would: nobody is told."""
        self._process.kill()

    def close(self) -> None:
        """End the process; returns when it is gone."""
        if self.alive:
            self.send(Close())
        self._out.put(None)
        self._end()
        self.broken = self.broken or "it was closed"

    def __enter__(self) -> ProcessLink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, wait: float) -> list[Message]:
        out: list[Message] = []
        try:
            found = self._came.get(timeout=wait) if wait > 0 else self._came.get_nowait()
            while True:
                match found:
                    case None:
                        self.broken = self.broken or "it ended"
                    case Ready():
                        self.ready = found
                    case Worked():
                        self.worked.append(found)
                    case _:
                        self.traffic.append((time.monotonic(), type(found).__name__))
                        out.append(found)
                found = self._came.get_nowait()
        except queue.Empty:
            return out


def _end(process: subprocess.Popen[str]) -> None:
    """Ask, tell, kill: whatever state it is in, it is gone and waited for."""
    for act in (None, process.terminate, process.kill):
        if act is not None:
            act()
        try:
            process.wait(GRACE if act is not process.kill else None)
            break
        except subprocess.TimeoutExpired:
            continue


def _write(pipe: IO[str], lines: queue.Queue[str | None], link: ProcessLink) -> None:
    try:
        while (line := lines.get()) is not None:
            _hold(link, "to_drafter")
            pipe.write(line + "\n")
            pipe.flush()
    except (OSError, ValueError):
        pass  # nobody listens: the reader sees the end
    finally:
        _shut(pipe)


def _read(pipe: IO[str], came: queue.Queue[Message | None], link: ProcessLink) -> None:
    try:
        for line in pipe:
            message = from_line(line)
            _hold(link, "to_target")
            came.put(message)
    except (PayloadError, OSError, ValueError) as err:
        with contextlib.suppress(ReferenceError):
            link.broken = str(err)
    finally:
        came.put(None)
        _shut(pipe)


def _hold(link: ProcessLink, side: str) -> None:
    try:
        delay: Delay | None = getattr(link, side)
    except ReferenceError:
        return
    if delay is not None:
        time.sleep(delay())


def _drain(pipe: IO[str], into: deque[str]) -> None:
    into.extend(pipe)
    _shut(pipe)


def _shut(pipe: IO[str]) -> None:
    with contextlib.suppress(OSError):
        pipe.close()


def pinned_cores(cores: Sequence[int]) -> tuple[int, ...]:
    """Bind the calling thread, and threads it starts, to cores; those it is bound to now (empty: cannot)."""
    if not hasattr(os, "sched_setaffinity"):
        return ()
    if cores:
        with contextlib.suppress(OSError):  # a core that is not there, or not ours: it runs where it may
            os.sched_setaffinity(0, cores)
    return tuple(sorted(os.sched_getaffinity(0)))
