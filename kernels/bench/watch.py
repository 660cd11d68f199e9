"""A child under watch: ask it, wait no longer than agreed, replace it when it hangs or dies.

Silence is what is limited: ``prepare`` seconds until the child says that it is about to launch, ``silence``
seconds from then on, anew with every part that arrives. A child that overruns is killed; its device memory
goes with it. What it said before stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

START_SECONDS, PREPARE_SECONDS, SILENCE_SECONDS = 120.0, 180.0, 20.0
_STEP, _LEAVE_SECONDS = 0.2, 15.0


@dataclass
class Answer:
    """What came back: ``parts`` merged, ``error`` ("" for none); whether it hung, lost its device or process,
    or was stopped."""

    parts: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    hung: bool = False
    lost: bool = False
    stopped: bool = False
    seconds: float = 0.0

    @property
    def complete(self) -> bool:
        """Whether the child finished what it was asked."""
        return not self.error


def command(device: str = "cuda") -> list[str]:
    """How the child that does the tasks is started."""
    return [sys.executable, "-m", "workbench.kernels.bench.child", device]


class Child:
    """One child process, started when first asked and again after it was lost; close it, or use ``with``.

    ``stop`` is asked several times a second; once true, the child is killed and the answer says stopped.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        prepare: float = PREPARE_SECONDS,
        silence: float = SILENCE_SECONDS,
        start: float = START_SECONDS,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._argv, self._stop = list(argv), stop
        self._start, self._prepare, self._silence = start, prepare, silence
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> Answer:
        """One request and everything said about it; never raises for what the child does."""
        began, answer = time.monotonic(), Answer()
        if self._process is None and not self._started(answer):
            return answer
        with contextlib.suppress(BrokenPipeError):
            if self._process is not None and self._process.stdin is not None:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
        limit, doing = self._prepare, "preparing"
        while (line := self._line(limit, answer, doing)) is not None:
            if "armed" in line:
                limit, doing = self._silence, str(line["armed"])
            elif "error" in line:
                answer.error = line["error"]
                answer.lost = bool(line["lost"])
                if answer.lost:
                    self.close()
                break
            elif "end" in line:
                break
            else:
                answer.parts |= line
        answer.seconds = time.monotonic() - began
        return answer

    def close(self) -> None:
        """End the process, if there is one, and collect it."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        # A process that the driver holds cannot even be killed; it is left behind.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_LEAVE_SECONDS)

    def _started(self, answer: Answer) -> bool:
        self._errors.seek(0)
        self._errors.truncate()
        self._lines = queue.Queue()
        self._process = subprocess.Popen(  # noqa: S603
            self._argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ctrl-C reaches the parent alone; it decides what becomes of the child
        )
        threading.Thread(target=_read, args=(self._process.stdout, self._lines), daemon=True).start()
        return self._line(self._start, answer, "starting") is not None

    def _line(self, limit: float, answer: Answer, doing: str) -> dict[str, Any] | None:
        """The next line; None when there is none, with the reason in ``answer``."""
        until = time.monotonic() + limit
        while True:
            if self._stop():
                answer.error, answer.stopped = "stopped", True
                break
            try:
                text = self._lines.get(timeout=_STEP)
            except queue.Empty:
                if time.monotonic() < until:
                    continue
                answer.error, answer.hung = f"no answer within {limit:g} s while {doing}; killed", True
                break
            if text:
                found: dict[str, Any] = json.loads(text)
                return found
            code = self._process.wait() if self._process is not None else 0
            answer.error = f"the process ended with status {code} while {doing}{self._last_words()}"
            answer.lost = True
            break
        self.close()
        return None

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read()[-4000:].decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""


def _read(stream: IO[str], lines: queue.Queue[str]) -> None:
    with contextlib.suppress(ValueError):  # closed under the reader
        for line in stream:
            lines.put(line)
    lines.put("")
