"""At which batch size a drafter stops paying: measured at every size, and predicted from batch 1 alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.core.drafters.contestants import Traits
from workbench.core.drafters.costs import Costs
from workbench.core.drafters.forecast import at_batch, doublings
from workbench.core.drafters.results import ratio
from workbench.core.drafters.settings import PLAIN
from workbench.core.drafters.turns import Turn
from workbench.spec.run import Metric
from workbench.speculative import predict


@dataclass(frozen=True)
class Crossing:
    """Speed-ups of one drafter on one set of prompts by batch size.

    ``at`` and ``predicted_at``: batch size where nothing is gained any more, log-linear between sizes; None
    within the sizes measured. ``doublings``: by how many powers of two they differ; None where neither
    crosses.
    """

    prompts: str
    drafter: str
    batches: tuple[int, ...]
    measured: tuple[float, ...]
    predicted: tuple[float, ...]
    at: float | None
    predicted_at: float | None
    doublings: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    def metrics(self) -> list[Metric]:
        """Where it stops paying, and its predicted speed-ups by batch."""
        name = f"{self.prompts}:{self.drafter}"
        out = [
            Metric(
                f"{self.prompts}_b{batch}:{self.drafter}:from_batch_1", gain, "×", "predicted", of=PLAIN,
                note="from acceptance and drafting at batch 1, and costs of steps by their rows",
            )
            for batch, gain in zip(self.batches, self.predicted, strict=True)
        ]  # fmt: skip
        if self.at is not None:
            out.append(Metric(f"{name}:stops_paying", self.at, "sequences"))
        if self.predicted_at is not None:
            out.append(Metric(f"{name}:stops_paying_predicted", self.predicted_at, "sequences", "predicted"))
        return out


def crossing(
    prompts: str,
    drafter: str,
    turns: Mapping[int, tuple[Sequence[Turn], Sequence[Turn]]],
    costs: Mapping[int, Costs],
    traits: Traits,
) -> Crossing | None:
    """From (drafted, plain) turns by batch size, 1 among them; None with fewer than two sizes."""
    sizes = sorted(b for b in turns if b in costs and all(_timed(side) for side in turns[b]))
    if len(sizes) < 2 or sizes[0] != 1:
        return None
    drafted, plain = turns[1]
    measured = [ratio(*turns[b]) for b in sizes]
    predicted = [
        at_batch(
            drafted, plain, costs[1], costs[b], batched=traits.batched, own_forward=traits.own_forward
        ).speedup
        for b in sizes
    ]
    return Crossing(
        prompts=prompts,
        drafter=drafter,
        batches=tuple(sizes),
        measured=tuple(measured),
        predicted=tuple(predicted),
        at=predict.crossover(sizes, measured),
        predicted_at=predict.crossover(sizes, predicted),
        doublings=doublings(sizes, predicted, measured),
    )


def _timed(turns: Sequence[Turn]) -> bool:
    return any(t.steps for t in turns)
