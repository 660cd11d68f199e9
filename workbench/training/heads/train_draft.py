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
from workbench.models.heads import HeadFile
from workbench.models.progress import Cancel, Progress
from workbench.spec.errors import OptionError
from workbench.speculative.distilled import KIND, kept_config
from workbench.speculative.draft_model import layers_kept
from workbench.training.heads.course import Course, Start, course
from workbench.training.heads.drafted import drafted
from workbench.training.heads.eagle import EagleLoss, EagleShape
from workbench.training.heads.evaluate import GREEDY, SAMPLED
from workbench.training.heads.losses import LossName
from workbench.training.heads.medusa import vocabulary_matrix
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.pruned import Pruned, layer_tensors
from workbench.training.heads.rows import frequent
from workbench.training.heads.run import VOCAB_KEPT
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
    shape = shape or DraftShape()

    def fits(head: HeadFile, target: Target) -> bool:
        return head.facts.get("begun") == list(shape.begun(target.source.config.num_layers))

    with course(
        model,
        KIND,
        data,
        shape,
        schedule or Schedule(),
        start=Start(start, f"draft model of {shape.layers} layers", fits),
        target=target,
        progress=progress,
        cancel=cancel,
    ) as way:
        return way.run.copied(_train(way, shape, prompts), out)


def _train(way: Course, shape: DraftShape, prompts: int) -> HeadFile:
    target, source = way.target, way.target.source
    config, begun = source.config, shape.begun(source.config.num_layers)
    trained, held = way.load((config.num_layers,), 0.3, best=True)
    ids = frequent((s.conversation for s in trained), config.vocab_size, VOCAB_KEPT)

    def loss_of(tensors: dict[str, Tensor]) -> DraftLoss:
        made = DraftModel(kept_config(config, begun), tensors, way.half)
        rest = (target.decoder, vocabulary_matrix(source), ids, trained)
        return DraftLoss(made, EagleShape(1, shape.vocab, shape.loss), *rest)  # type: ignore[arg-type]

    first = layer_tensors(source, begun)
    if way.before is not None:
        found = decoded(way.before.tensors())
        first = {name: found[name].float() for name in first}
    loss = loss_of(first)

    def look() -> dict[str, Any]:
        found = drafted(loss, held[:LOOKED], 2)
        return {"right_1": found["full"][0], "right_2": found["full"][1], "alpha": found["alpha"][0]}

    facts = way.optimise(loss.model, loss, trained, look, 0.3, 0.9)
    tensors = encoded(loss.model.tensors())
    kept = loss_of(decoded(tensors))  # what the file holds is what is measured
    facts |= {
        "layers": shape.layers,
        "begun": list(begun),
        "vocab": len(loss.kept),
        "held_out": {"conversations": len(held), **drafted(kept, held, DRAFTED, cancel=way.cancel)},
    }
    return way.write(facts, {**tensors, "ids": ids}, RUNS, held, prompts)
