"""From a model's name to a draft model: some of its layers, distilled; data, training, measuring, one file.

    from workbench.training.heads.train_draft import train_draft
    train_draft("tiny", DataSettings(tokens=20_000), DraftShape(layers=2), Schedule(steps=300))

A draft model reads tokens alone, so what it is taught on is what it will see: no training-time test. It
learns the target's law, and at the end acceptance itself (``hybrid``); its output rows are the target's.
Everything that was made is kept, whenever it is stopped; the same call goes on from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from workbench.models.coded_head import decoded, encoded
from workbench.models.heads import HeadFile, read_head, write_head
from workbench.models.progress import Cancel, Progress, part, report
from workbench.spec.errors import HeadMismatch, OptionError
from workbench.speculative.distilled import KIND, kept_config
from workbench.speculative.draft_model import layers_kept
from workbench.training.heads.drafted import drafted
from workbench.training.heads.eagle import EagleLoss, EagleShape
from workbench.training.heads.evaluate import GREEDY, SAMPLED, asked_of, measured
from workbench.training.heads.losses import LossName
from workbench.training.heads.medusa import vocabulary_matrix
from workbench.training.heads.optimise import Schedule, optimise
from workbench.training.heads.pruned import Pruned, layer_tensors
from workbench.training.heads.rows import frequent, load
from workbench.training.heads.run import VOCAB_KEPT, Run, shards_of
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.target import Target
from workbench.training.heads.unroll import Batch

_USE = f"draft_model:source=trained,vocab={VOCAB_KEPT}"
RUNS = {
    "chain": (_USE, GREEDY),
    "chain, temperature 1": (_USE, SAMPLED),
    "chain of likeliest, temperature 1": (f"{_USE},draws=false", SAMPLED),
}
"""What the engine does with a finished draft model."""
LOOKED = 16  # held-out conversations that a point of the curve is measured on
DRAFTED = 4
_KEPT = ("recipe", "trained", "curve", "before")  # facts of the draft model that one goes on from


@dataclass(frozen=True)
class DraftShape:
    """``layers`` of the target that it starts from; ``vocab`` tokens of the loss."""

    layers: int = 6
    vocab: int = VOCAB_KEPT
    loss: LossName = "hybrid"

    def begun(self, total: int) -> tuple[int, ...]:
        """Which of a target's ``total`` layers it starts as: the first ones, and the last.

        Raises :class:`OptionError` for as many as there are.
        """
        if not 1 <= self.layers < total:
            raise OptionError(
                f"A draft model of {self.layers!r} layers is none for a model of {total}.",
                hint=f"Choose 1 to {total - 1} layers.",
            )
        return layers_kept(total, self.layers)


class DraftModel(Pruned):
    """Layers as the loss of heads takes them."""

    form = SimpleNamespace(kind=KIND)

    def outlet(self, given: Tensor) -> Tensor:
        """What the vocabulary matrix is given: the last norm is already in it."""
        return given


class DraftLoss(EagleLoss):
    """One row per token, whatever was drafted before it: every step of a draft has the same law."""

    model: DraftModel  # type: ignore[assignment]

    def run(
        self, batch: Batch, steps: int, noise: torch.Generator | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """What the draft model gives the vocabulary matrix at the answers' rows, and what the target does."""
        dtype = self.decoder.weights.residual_dtype
        with torch.no_grad():
            embedded = self.decoder.embed(batch.ids)
            target = self.decoder.final_norm(batch.last(dtype))
        return [self.model(embedded, batch)] * steps, target


def train_draft(
    model: str | Path,
    data: DataSettings | None = None,
    shape: DraftShape | None = None,
    schedule: Schedule | None = None,
    *,
    start: Path | None = None,
    out: Path | None = None,
    prompts: int = 12,
    target: Target | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> HeadFile:
    """Distil, measure and write a draft model; gives the file that the ``draft_model`` technique finds.

    ``start``: the file of a draft model to go on from; without one it starts as layers of the target.
    ``out``: a folder of heads that gets a copy of the file in the cache folder. ``prompts``: held-out prompts
    that the engine answers with the finished model.

    Raises :class:`ModelError` s, :class:`OptionError`, :class:`TrainingError` and ``Cancelled``.
    """
    data, shape, schedule = data or DataSettings(), shape or DraftShape(), schedule or Schedule()
    with shards_of(model, data, target, progress, cancel) as shards:
        before = None if start is None else _before(start, shape, shards.target)
        run = Run(model, KIND, shards, shape, schedule, "" if before is None else before.digest)
        return run.copied(_train(run, shape, before, prompts, progress, cancel), out)


def _before(path: Path, shape: DraftShape, target: Target) -> HeadFile:
    """The draft model to go on from. Raises :class:`HeadMismatch` for one of another model or size."""
    found, source = read_head(path), target.source
    begun = list(shape.begun(source.config.num_layers))
    if found.kind != KIND or found.fingerprint != source.fingerprint or found.facts.get("begun") != begun:
        raise HeadMismatch(
            f"{path} is no draft model of {shape.layers} layers of this model's weights to go on from.",
            hint="Start without it, or from one that was distilled from this model.",
        )
    return found


def _train(
    run: Run,
    shape: DraftShape,
    before: HeadFile | None,
    prompts: int,
    progress: Progress | None,
    cancel: Cancel | None,
) -> HeadFile:
    target, source = run.shards.target, run.shards.target.source
    config, begun = source.config, shape.begun(source.config.num_layers)
    trained, held = load(run.shards, (config.num_layers,), part(progress, 0.02, 0.3), cancel, best=True)
    ids = frequent((s.conversation for s in trained), config.vocab_size, VOCAB_KEPT)
    half = torch.bfloat16 if target.plan.dtype == "bfloat16" else None

    def loss_of(tensors: dict[str, Tensor]) -> DraftLoss:
        made = DraftModel(kept_config(config, begun), tensors, half)
        rest = (target.decoder, vocabulary_matrix(source), ids, trained)
        return DraftLoss(made, EagleShape(1, shape.vocab, shape.loss), *rest)  # type: ignore[arg-type]

    first = layer_tensors(source, begun)
    if before is not None:
        found = decoded(before.tensors())
        first = {name: found[name].float() for name in first}
    loss = loss_of(first)

    def look() -> dict[str, Any]:
        found = drafted(loss, held[:LOOKED], 2)
        return {"right_1": found["full"][0], "right_2": found["full"][1], "alpha": found["alpha"][0]}

    state = optimise(
        loss.model,
        loss,
        len(trained),
        run.schedule,
        run.folder(len(trained)),
        run.key(len(trained)),
        look,
        part(progress, 0.3, 0.9),
        cancel,
    )
    report(progress, 0.9, "measuring")
    tensors = encoded(loss.model.tensors())
    kept = loss_of(decoded(tensors))  # what the file holds is what is measured
    facts: dict[str, Any] = {
        **run.facts([s.conversation for s in trained], state),
        "layers": shape.layers,
        "begun": list(begun),
        "vocab": len(loss.kept),
        "held_out": {"conversations": len(held), **drafted(kept, held, DRAFTED, cancel=cancel)},
    }
    if before is not None:
        facts["before"] = {n: v for n, v in before.facts.items() if n in _KEPT}
    write_head(run.path, KIND, source.fingerprint, facts, {**tensors, "ids": ids})
    asked = asked_of((s.conversation for s in held), prompts)
    if asked:
        facts["engine"] = measured(target, RUNS, asked, part(progress, 0.92, 1.0), cancel)
        write_head(run.path, KIND, source.fingerprint, facts, {**tensors, "ids": ids})
    return read_head(run.path)
