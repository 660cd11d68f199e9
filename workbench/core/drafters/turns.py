"""One turn of a drafter, or of plain decoding: a group of prompts, decoded with a full batch.

Only steps in which the whole batch decodes, and no prompt is read, are timed and counted: a prompt that ends
makes room for the next, and what is left when none waits is not run. So a batch of B stays one of B, whatever
a drafter gains for each of its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from workbench.engine.engine import Engine
from workbench.engine.params import SamplingParams
from workbench.engine.sequence import Request
from workbench.spec.errors import RequestError
from workbench.spec.events import DraftRecord, StepEvent
from workbench.speculative.round_costs import levels


@dataclass(frozen=True)
class Step:
    """A decode step: ``rows`` of the forward, sequences ``drafted`` for, ``levels`` of the deepest draft,
    ``tokens`` gained, and milliseconds of the phases forward, draft, and all others together."""

    rows: int
    drafted: int
    levels: int
    tokens: int
    forward: float
    draft: float
    rest: float

    @property
    def ms(self) -> float:
        """All of it."""
        return self.forward + self.draft + self.rest

    @classmethod
    def of(cls, event: StepEvent, tokens: int) -> Step:
        """From an engine's step that gained ``tokens``."""
        forward, draft = (event.phase_ms.get(p, 0.0) for p in ("forward", "draft"))
        rest = event.total_ms - forward - draft
        ms = (round(v, 4) for v in (forward, draft, rest))
        return cls(event.rows, len(event.drafts), levels(event.drafts), tokens, *ms)


@dataclass(frozen=True)
class Turn:
    """What came of a group of prompts with a batch of ``batch``.

    ``drafts``: nodes, nodes kept and tokens emitted of each verified draft. ``outputs``: ids said behind each
    prompt, as far as the turn went.
    """

    batch: int
    steps: tuple[Step, ...]
    drafts: tuple[tuple[int, int, int], ...]
    outputs: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        """Gained in the timed steps."""
        return sum(s.tokens for s in self.steps)

    @property
    def ms(self) -> float:
        """Of the timed steps."""
        return sum(s.ms for s in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, steps as rows of numbers."""
        return {**asdict(self), "steps": [list(asdict(s).values()) for s in self.steps]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Turn:
        """The turn of :meth:`to_dict`."""
        return cls(
            int(data["batch"]),
            tuple(Step(*s) for s in data["steps"]),
            tuple((int(n), int(k), int(e)) for n, k, e in data["drafts"]),
            tuple(tuple(int(i) for i in ids) for ids in data["outputs"]),
        )


def take_turn(engine: Engine, prompts: Sequence[Sequence[int]], batch: int, params: SamplingParams) -> Turn:
    """Decode ``prompts``, ``batch`` at a time, until fewer than that are left; prompt i has seed + i.

    The engine must be idle, and have no room for more than ``batch`` sequences. Raises
    :class:`RequestError` for a prompt that cannot be served.
    """
    outputs: dict[str, list[int]] = {f"t{i}": [] for i in range(len(prompts))}
    for i, (name, ids) in enumerate(zip(outputs, prompts, strict=True)):
        engine.add(Request(name, tuple(ids), replace(params, seed=params.seed + i)))
    steps: list[Step] = []
    drafts: list[tuple[int, int, int]] = []
    with torch.inference_mode():
        while len(engine.alive()) >= batch:
            event, said = engine.step()
            for one in said:
                outputs[one.request_id] += [t.id for t in one.tokens]
                if one.error is not None:
                    engine.reset()
                    raise RequestError(one.error["message"], hint=one.error.get("hint", ""))
            if event.prefill or event.decode != batch:
                continue
            steps.append(Step.of(event, sum(len(one.tokens) for one in said)))
            drafts += [_of(d) for d in event.drafts]
        engine.reset()
    return Turn(batch, tuple(steps), tuple(drafts), tuple(tuple(ids) for ids in outputs.values()))


def _of(record: DraftRecord) -> tuple[int, int, int]:
    # What was cut off at the end of a text counts as not accepted.
    return len(record.tokens), min(len(record.accepted), record.emitted), record.emitted


def same_outputs(mine: Turn, plain: Turn) -> int:
    """For how many prompts both said the same, as far as both went."""
    pairs = zip(mine.outputs, plain.outputs, strict=True)
    return sum(a[: min(len(a), len(b))] == b[: min(len(a), len(b))] for a, b in pairs)
