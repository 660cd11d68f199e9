"""What output tokens cost: a price that somebody enters, times the time that was measured.

Nothing is assumed of machines, discounts or utilisation: the price is of the machine per hour, whatever it
is, and the time is that of the run, all of whose outputs share the machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from workbench.spec.errors import OptionError
from workbench.spec.run import Metric, Run

PER = 1000
"""Tokens that a price is given for."""


def cost_of(price: float, itl_ms: float, tokens: float = 1.0, outputs: int = 1) -> float:
    """Cost of 1,000 output tokens in the unit of ``price`` per hour.

    ``itl_ms``: milliseconds between two deliveries of an output, which hold ``tokens`` each on average;
    ``outputs`` are served side by side. Raises :class:`OptionError` for what is no price or no time.
    """
    if not (math.isfinite(price) and price >= 0):
        raise OptionError(f"A price of {price!r} per hour is none.", hint="Give a number, 0 or more.")
    if not (itl_ms > 0 and tokens > 0 and outputs > 0):
        raise OptionError(
            f"{itl_ms!r} ms for {tokens!r} tokens of {outputs!r} outputs are no time per token.",
            hint="Measure a run with more than one delivery.",
        )
    return price / 3_600_000 * itl_ms / tokens / outputs * PER


def cost_metric(metrics: Sequence[Metric], price: float) -> Metric | None:
    """The cost of a run's output tokens from its measured decode speed; None where it has none.

    Prompts are not in it: their time is TTFT.
    """
    speed = next((m for m in metrics if m.name == "decode_speed"), None)
    if speed is None or not speed.value > 0:
        return None
    cost = cost_of(price, 1000 / speed.value)
    note = f"at {price:g} per hour, entered; speed {speed.tag}; prompts not counted"
    return Metric("cost", cost, f"per {PER:,} tokens", tag="predicted", n=speed.n, better="lower", note=note)


def priced(run: Run, price: float) -> Run:
    """The run with its cost beside what was measured; unchanged where it has no decode speed."""
    cost = cost_metric(run.metrics, price)
    return run if cost is None else replace(run, metrics=(*run.metrics, cost))
