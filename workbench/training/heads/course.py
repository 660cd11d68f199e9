"""What every training does around its loss: hold the data, go on from a head, optimise, write, measure.

A file of its own per kind of head says what the head is, what its loss is, and what its file holds; the way
from a model's name to that file is here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.params import SamplingParams
from workbench.models.heads import HeadFile, read_head, write_head
from workbench.models.progress import Cancel, Progress, part, report
from workbench.spec.errors import HeadMismatch
from workbench.training.heads.evaluate import asked_of, measured
from workbench.training.heads.optimise import Loss, Schedule, Watch, optimise
from workbench.training.heads.rows import Rows, Shown, load
from workbench.training.heads.run import Run, shards_of
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.target import Target

_KEPT = ("recipe", "trained", "curve", "before")  # facts of the head that one goes on from


@dataclass(frozen=True)
class Start:
    """The file of a head to go on from, where there is one; ``fits`` says whether it is what is ``named``."""

    path: Path | None
    named: str
    fits: Callable[[HeadFile, Target], bool]

    def head(self, kind: str, target: Target) -> HeadFile | None:
        """The head. Raises :class:`HeadMismatch` for one of another kind, other weights or another size."""
        if self.path is None:
            return None
        found = read_head(self.path)
        ours = found.kind == kind and found.fingerprint == target.source.fingerprint
        if not ours or not self.fits(found, target):
            raise HeadMismatch(
                f"{self.path} is no {self.named} of this model's weights to go on from.",
                hint="Start without it, or from one that was trained for this model.",
            )
        return found


@dataclass(frozen=True)
class Course:
    """A run under way; ``before``: the head that it goes on from."""

    run: Run
    before: HeadFile | None = None
    progress: Progress | None = None
    cancel: Cancel | None = None

    @property
    def target(self) -> Target:
        """The model that the head is for."""
        return self.run.shards.target

    @property
    def half(self) -> torch.dtype | None:
        """What its matrices are multiplied in, where that is not their own precision."""
        return torch.bfloat16 if self.target.plan.dtype == "bfloat16" else None

    def load(
        self, layers: Sequence[int], upto: float, *, best: bool = False
    ) -> tuple[list[Shown], list[Shown]]:
        """What to train on and what is held out, as :func:`load`; the progress is at ``upto`` then."""
        return load(self.run.shards, layers, part(self.progress, 0.02, upto), self.cancel, best=best)

    def optimise(
        self,
        model: nn.Module,
        loss: Loss,
        trained: Sequence[Shown] | Sequence[Rows],
        look: Callable[[], Mapping[str, float]],
        since: float,
        upto: float,
        *,
        slower: Mapping[str, float] | None = None,
        watch: Watch | None = None,
    ) -> dict[str, Any]:
        """Train ``model`` in place (:func:`optimise`), or go on where its run stopped; facts of the run."""
        run, count = self.run, len(trained)
        state = optimise(
            model,
            loss,
            count,
            run.schedule,
            run.folder(count),
            run.key(count),
            look,
            part(self.progress, since, upto),
            self.cancel,
            slower=slower,
            watch=watch,
        )
        report(self.progress, upto, "measuring")
        facts = run.facts([each.conversation for each in trained], state)
        if self.before is not None:
            facts["before"] = {n: v for n, v in self.before.facts.items() if n in _KEPT}
        return facts

    def write(
        self,
        facts: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        runs: Mapping[str, tuple[str, SamplingParams]] | None = None,
        held: Sequence[Shown] | Sequence[Rows] = (),
        prompts: int = 0,
    ) -> HeadFile:
        """Write the head, and again with what the engine does with it on ``prompts`` of what was held out.

        The engine finds it as anybody's would: by its file. ``runs``: drafters, and how they answer.
        """
        path, kind, fingerprint = self.run.path, self.run.kind, self.target.source.fingerprint
        write_head(path, kind, fingerprint, facts, tensors)
        asked = asked_of((each.conversation for each in held), prompts)
        if runs and asked:
            found = measured(self.target, runs, asked, part(self.progress, 0.92, 1.0), self.cancel)
            write_head(path, kind, fingerprint, {**facts, "engine": found}, tensors)
        return read_head(path)


@contextmanager
def course(
    model: str | Path,
    kind: str,
    data: DataSettings | None,
    shape: Any,
    schedule: Schedule,
    *,
    start: Start | None = None,
    target: Target | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Iterator[Course]:
    """A training of a model's head, its data held against another one; raises what :class:`Start` does."""
    with shards_of(model, data or DataSettings(), target, progress, cancel) as shards:
        before = None if start is None else start.head(kind, shards.target)
        run = Run(model, kind, shards, shape, schedule, "" if before is None else before.digest)
        yield Course(run, before, progress, cancel)
