"""The drafter's loop in a process of its own: read all there is, then one batch; sleep only without work."""

from __future__ import annotations

import time

from workbench.speculative.placement.messages import Ready, Worked
from workbench.speculative.placement.process_inbox import Inbox
from workbench.speculative.placement.worker import Worker


def serve(worker: Worker, inbox: Inbox, cores: tuple[int, ...] = ()) -> None:
    """Run until the target closes all, or is gone."""
    inbox.say(Ready(cores, worker.kv.weights_nbytes()))
    while not worker.closed:
        messages = inbox.messages(wait=not worker.has_work)
        if messages is None:
            return
        for message in messages:
            answer = worker.handle(message)
            if answer is not None:
                inbox.say(answer)
        start = time.monotonic()
        tail, rows = worker.work()
        if tail is not None:
            inbox.say(tail)
        if rows:
            inbox.say(Worked(start, time.monotonic(), rows, worker.made, worker.kv.nbytes()))
