"""A drafter's side in this process: it works when it is asked what it has, so nothing is a matter of time.

The same messages as between two processes, and the same work; only nothing is hidden behind anything.
"""

from __future__ import annotations

import time

from workbench.speculative.placement.messages import Message
from workbench.speculative.placement.worker import Worker


class Unplaced:
    """The link of a drafter that was given no place: nobody listens."""

    alive = False
    broken = ""

    def send(self, message: Message) -> None:
        """Lost."""

    def poll(self, wait: float = 0.0) -> list[Message]:
        """Nothing."""
        return []

    def clock(self) -> float:
        """The system's."""
        return time.monotonic()

    def nbytes(self) -> int:
        """Nothing is held."""
        return 0


class HereLink:
    """``batches``: done each time it is asked for what has come; 0: until there is nothing more to do."""

    alive = True
    broken = ""

    def __init__(self, worker: Worker, batches: int = 0) -> None:
        self.worker = worker
        self._batches = batches
        self._out: list[Message] = []

    def send(self, message: Message) -> None:
        """Say something: it is heard at once."""
        answer = self.worker.handle(message)
        if answer is not None:
            self._out.append(answer)

    def poll(self, wait: float = 0.0) -> list[Message]:
        """Work, and what came of it."""
        done = 0
        while self.worker.has_work and not (self._batches and done >= self._batches):
            tail, _ = self.worker.work()
            done += 1
            if tail is not None:
                self._out.append(tail)
        out, self._out = self._out, []
        return out

    def clock(self) -> float:
        """The system's."""
        return time.monotonic()

    def nbytes(self) -> int:
        """Bytes of the drafter's KV: its weights are the target's."""
        return self.worker.kv.nbytes()
