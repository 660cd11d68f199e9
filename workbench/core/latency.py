"""Latency by its textbook definitions, from deliveries and steps.

TTFT: submission to the first token of an output, waiting for other requests included (*queue*); where model
or recipe were still being put in place, TTFT begins once they were (*opening* says how long that took).
TPOT: (last token − first token) / (tokens − 1) of an output. ITL: time between two deliveries of an output (a
delivery may hold several tokens). Decode speed: tokens after each output's first, over the time from the
first to the last of them all. Several outputs give the median and the range.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Literal

from workbench.core.output import Output
from workbench.spec.events import PHASES, StepEvent
from workbench.spec.run import Metric

HOST_PHASES = ("schedule", "prepare", "commit", "emit")


def latency(
    outputs: Sequence[Output], steps: Sequence[StepEvent], submitted: float, ready: float = 0.0
) -> tuple[Metric, ...]:
    """TTFT, TPOT, ITL, throughput and step phases.

    ``submitted`` and ``ready``, when the engine was there, in seconds of ``time.perf_counter``.
    """
    out: list[Metric] = []
    started = [o for o in outputs if o.deliveries]
    begin = max(submitted, ready)
    waited = max((steps[0].time - begin) * 1e3, 0.0) if steps else 0.0
    ttft = [(o.deliveries[0][0] - begin) * 1e3 for o in started]
    tpot = [
        (o.deliveries[-1][0] - o.deliveries[0][0]) * 1e3 / (len(o.tokens) - o.deliveries[0][1])
        for o in started
        if len(o.tokens) > o.deliveries[0][1]
    ]
    itl = [(b[0] - a[0]) * 1e3 for o in started for a, b in zip(o.deliveries, o.deliveries[1:], strict=False)]
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        if values:
            out.append(_repeated(name, values, better="lower"))
    if started:
        note = "part of TTFT: until the first step began"
        out.append(Metric("queue", waited, "ms", better="lower", note=note))
    if started and begin > submitted:
        note = "before TTFT: until model and recipe were in place"
        out.append(Metric("opening", (begin - submitted) * 1e3, "ms", better="lower", note=note))
    later = sum(len(o.tokens) - o.deliveries[0][1] for o in started)
    if later:
        seconds = max(o.deliveries[-1][0] for o in started) - min(o.deliveries[0][0] for o in started)
        out.append(Metric("decode_speed", later / max(seconds, 1e-9), "tok/s", better="higher"))
    return tuple(out) + step_phases(steps)


def step_phases(steps: Sequence[StepEvent]) -> tuple[Metric, ...]:
    """Mean of each phase per step, and the share of the host's own work in all of them."""
    if not steps:
        return ()
    out = []
    total = sum(s.total_ms for s in steps)
    for phase in PHASES:
        spent = [s.phase_ms.get(phase, 0.0) for s in steps]
        spread = (min(spent), max(spent))
        mean = sum(spent) / len(spent)
        out.append(Metric(f"phase_{phase}", mean, "ms", n=len(spent), spread=spread, note="mean per step"))
    host = sum(s.phase_ms.get(p, 0.0) for s in steps for p in HOST_PHASES)
    share = 100 * host / max(total, 1e-9)
    note = " + ".join(HOST_PHASES)
    out.append(Metric("overhead", share, "%", n=len(steps), of="step time", better="lower", note=note))
    return tuple(out)


def _repeated(name: str, values: Sequence[float], *, better: Literal["lower", "higher"]) -> Metric:
    spread = (min(values), max(values))
    return Metric(name, median(values), "ms", n=len(values), spread=spread, better=better)
