"""The drafter's end in a process of its own: what came, without waiting, and an end that cannot be missed.

Opened before anything heavy is imported: from then on the process ends when its pipe does, and when its
parent is gone while somebody else still holds the pipe. A batch that runs is given a moment to end.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from typing import IO

from workbench.speculative.placement.messages import Message, from_line, to_line

_LOOK = 0.5
_LAST = 1.0


class Inbox:
    """Lines of the target on ``source``, messages to it on what was stdout; other output goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._source: IO[str] = sys.stdin
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._parent = int(sys.argv[1])  # asked for here, it might be gone already
        threading.Thread(target=self._watch, daemon=True).start()
        self.setup = self._source.readline()
        threading.Thread(target=self._read, daemon=True).start()

    def messages(self, wait: bool) -> list[Message] | None:
        """What has come; waits for the first if told to. None: the target is gone."""
        out: list[Message] = []
        try:
            line = self._lines.get(block=wait)
            while line is not None:
                out.append(from_line(line))
                line = self._lines.get_nowait()
        except queue.Empty:
            return out
        return None

    def say(self, message: Message) -> None:
        """Tell the target; the process ends where nobody listens."""
        try:
            self._out.write(to_line(message) + "\n")
            self._out.flush()
        except (OSError, ValueError):
            os._exit(0)

    def _read(self) -> None:
        for line in self._source:
            self._lines.put(line)
        self._lines.put(None)
        time.sleep(_LAST)
        os._exit(0)  # whatever still runs runs for nobody

    def _watch(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(_LOOK)
        os._exit(0)
