"""Timing on a GPU: medians of event times, inputs that rotate past the L2 cache, graphs for short calls.

The numbers of repeats are worked out by plain functions; only ``events`` and ``graph`` need a device.
A call shorter than ``GRAPH_BELOW`` is replayed from a CUDA graph, because launching it from Python takes
longer than it runs; what cannot be captured is timed by events and says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

GRAPH_BELOW = 200e-6
"""Seconds by events below which a graph is tried: a 50 us kernel shows as about this with its launch."""
L2_TIMES = 3
SPAN = 0.15
"""Seconds that one measurement should take."""
LEAST, MOST = 10, 200


@dataclass(frozen=True)
class Timed:
    """Seconds of one call: ``median``, ``low`` and ``high`` (tenth, ninetieth percentile), how measured."""

    median: float
    low: float
    high: float
    repeats: int
    by: str

    def to_dict(self) -> dict[str, float | int | str]:
        """Plain data."""
        return dict(vars(self))


def copies(nbytes: int, l2: int, most: int = 64) -> int:
    """Input sets that together exceed ``L2_TIMES`` caches, so that no call finds its inputs there."""
    return max(1, min(most, -(-L2_TIMES * l2 // max(1, nbytes))))


def repeats(seconds: float, sets: int = 1) -> int:
    """How often a call of that length is measured: whole rounds over the sets, ``LEAST`` to ``MOST``."""
    wanted = max(LEAST, min(MOST, int(SPAN / max(seconds, 1e-9))))
    return -(-wanted // sets) * sets


def summary(samples: Sequence[float], by: str) -> Timed:
    """Median and spread of seconds."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Timed(
        statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)], len(ordered), by
    )


def measure(calls: Sequence[Callable[[], object]]) -> Timed:
    """Time calls that do the same on different inputs, one after another, after a warm-up of each."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    first = events(calls, max(3, len(calls)))
    if first.median < GRAPH_BELOW:
        try:
            return graph(calls, repeats(first.median, len(calls)))
        except RuntimeError as error:  # capture refuses what synchronises or allocates outside the pool
            torch.cuda.synchronize()
            found = events(calls, repeats(first.median, len(calls)))
            reason = (str(error).splitlines() or ["no reason given"])[0][:80]
            return Timed(**{**vars(found), "by": f"events; no graph: {reason}"})
    return events(calls, repeats(first.median, len(calls)))


def events(calls: Sequence[Callable[[], object]], count: int) -> Timed:
    """Event times of ``count`` calls in turn."""
    pairs = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
    ]
    for i, (begin, end) in enumerate(pairs):
        begin.record()
        calls[i % len(calls)]()
        end.record()
    torch.cuda.synchronize()
    return summary([begin.elapsed_time(end) / 1e3 for begin, end in pairs], "events")


def graph(calls: Sequence[Callable[[], object]], count: int, rounds: int = 11) -> Timed:
    """Time per call when ``count`` calls are replayed from one graph; ``rounds`` replays."""
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for i in range(count):
            calls[i % len(calls)]()
    captured.replay()
    torch.cuda.synchronize()
    found = events([captured.replay], rounds)
    return Timed(
        found.median / count, found.low / count, found.high / count, rounds, f"graph of {count} calls"
    )
