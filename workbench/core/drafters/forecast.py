"""The speed-up that other prompts and costs measured apart predict; where a batch is too large to gain.

S = tokens of a step / (v + draft + o), everything in plain steps (``workbench.speculative.predict``), with
what really happens in steps: those without a draft are in, each step has the rows that it has, and drafting
and all else cost what they cost by the depth of the draft. From batch 1 the same is predicted for any batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import log2
from statistics import fmean, median

from workbench.core.drafters.costs import Costs
from workbench.core.drafters.turns import Step, Turn
from workbench.spec.errors import RecordError
from workbench.speculative import predict


@dataclass(frozen=True)
class Forecast:
    """``tokens`` per sequence and step; ``verify``, ``draft``, ``overhead`` of a step, in plain steps."""

    tokens: float
    verify: float
    draft: float
    overhead: float

    @property
    def speedup(self) -> float:
        """Plain time over drafted time per token."""
        return predict.speedup(self.tokens, 1.0, self.verify, self.draft, self.overhead)


def forecast(
    drafted: Sequence[Turn], plain: Sequence[Turn], costs: Costs, *, own_forward: bool = False
) -> Forecast:
    """From turns of a drafter and of plain decoding on other prompts, and costs of the same batch.

    ``own_forward``: the forward is not the model's whole one (a drafter that runs some of its layers), so
    its cost is that of those turns too. Raises :class:`RecordError` without steps.
    """
    steps, base = steps_of(drafted), steps_of(plain)
    step_ms = median(s.ms for s in base)
    if own_forward:
        forward = _typical(steps, lambda s: (s.rows, s.drafted > 0), lambda s: s.forward)
        verify = 1.0 + (forward - median(s.forward for s in base)) / step_ms
    else:
        verify = fmean(costs.verify(s.rows) for s in steps)
    draft = _typical(steps, lambda s: s.levels, lambda s: s.draft) / step_ms
    rest = _typical(steps, lambda s: s.drafted, lambda s: s.rest)
    batch = drafted[0].batch
    return Forecast(
        tokens=fmean(s.tokens for s in steps) / batch,
        verify=verify,
        draft=draft,
        overhead=(rest - median(s.rest for s in base)) / step_ms,
    )


def at_batch(
    drafted: Sequence[Turn],
    plain: Sequence[Turn],
    alone: Costs,
    costs: Costs,
    *,
    batched: bool,
    own_forward: bool = False,
) -> Forecast:
    """For the batch of ``costs``, from turns of batch 1 and costs of both.

    Tokens of a sequence's step stay as they were. A drafter that is ``batched`` drafts for all in passes of
    its own, which are taken to grow as plain steps do; another one takes its time for each sequence.
    """
    steps, base = steps_of(drafted), steps_of(plain)
    here = forecast(drafted, plain, alone, own_forward=own_forward)
    n = costs.batch
    share = fmean(s.drafted > 0 for s in steps)
    any_of_them = 1.0 - (1.0 - share) ** n
    nodes = fmean(s.rows for s in steps) - 1.0  # of a step, with a draft or without
    rows = n + n * nodes / any_of_them if any_of_them else float(n)
    slower = costs.plain_ms / alone.plain_ms
    scale = median(s.ms for s in base) / alone.plain_ms  # from their plain steps to padded ones
    verify = 1.0 + any_of_them * (costs.verify(rows) - 1.0)
    if own_forward:  # what it saved of a whole forward, it saves here
        verify += here.verify - fmean(alone.verify(s.rows) for s in steps)
    # What a drafter adds beside padded drafts, it adds for each sequence.
    own = here.overhead * scale - fmean(alone.beside(s.rows) for s in steps)
    overhead = any_of_them * costs.beside(rows) + own * n / slower
    draft = here.draft * scale
    if batched:
        draft *= any_of_them / share if share else 1.0
    else:
        draft *= n / slower
    return Forecast(here.tokens, verify, draft, overhead)


def off(predicted: float, measured: float) -> float:
    """Relative error of a prediction."""
    return predicted / measured - 1.0


def doublings(batches: Sequence[int], predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """By how many powers of two predicted and measured crossover differ, at least.

    One that lies beyond the sizes counts as the largest of them; None where both do.
    """
    found = [predict.crossover(batches, gains) for gains in (predicted, measured)]
    if found == [None, None]:
        return None
    first, second = (float(batches[-1]) if at is None else at for at in found)
    return abs(log2(first / second))


def steps_of(turns: Sequence[Turn]) -> list[Step]:
    """All timed steps. Raises :class:`RecordError` when there are none."""
    steps = [s for t in turns for s in t.steps]
    if not steps:
        raise RecordError(
            "No step was timed with a full batch.", hint="Ask for more tokens, or smaller batches."
        )
    return steps


def _typical(steps: Sequence[Step], key: Callable[[Step], Hashable], ms: Callable[[Step], float]) -> float:
    """Mean over steps of the median of those alike: what disturbs a single step does not count."""
    alike: dict[Hashable, list[float]] = {}
    for step in steps:
        alike.setdefault(key(step), []).append(ms(step))
    return sum(len(some) * median(some) for some in alike.values()) / len(steps)
