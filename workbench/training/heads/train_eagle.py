"""From a model's name to an EAGLE or FastEagle head that drafts for it: data, training, measuring, one file.

    from workbench.training.heads.train_eagle import train_eagle
    train_eagle("eagle3", "tiny", DataSettings(tokens=20_000), EagleShape(), Schedule(steps=300))

Needs no session. Everything that was made is kept, whenever it is stopped; the same call goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.engine.params import SamplingParams
from workbench.models.heads import HeadFile
from workbench.models.progress import Cancel, Progress
from workbench.training.heads.cascade import Cascade, CascadeLoss, begin_cascade, cascade_shapes
from workbench.training.heads.course import Course, Start, course
from workbench.training.heads.drafted import drafted
from workbench.training.heads.drafter import Drafter, Form, Kind, layers_read
from workbench.training.heads.eagle import EagleLoss, EagleShape
from workbench.training.heads.evaluate import GREEDY, SAMPLED
from workbench.training.heads.initial import initial
from workbench.training.heads.medusa import vocabulary_matrix
from workbench.training.heads.optimise import Schedule, Watch
from workbench.training.heads.rows import Shown, frequent
from workbench.training.heads.run import VOCAB_LISTED
from workbench.training.heads.shards import DataSettings
from workbench.training.heads.target import Target

Trained = Kind | Literal["fasteagle"]
RUNS: dict[Trained, dict[str, tuple[str, SamplingParams]]] = {
    kind: {
        "chain": (chain, GREEDY),
        "tree": (tree, GREEDY),
        "chain, temperature 1": (chain, SAMPLED),
        "chain of likeliest, temperature 1": (f"{chain},draws=false", SAMPLED),
        "tree, temperature 1": (tree, SAMPLED),
    }
    for kind, chain, tree in (
        ("eagle3", "eagle3:depth=4", "eagle3:width=4,nodes=16"),
        ("eagle", "eagle:tree=chain,depth=4", "eagle:tree=dynamic,nodes=16"),
        ("fasteagle", "fasteagle:width=1", "fasteagle:width=4"),
    )
}
"""What the engine does with a finished head."""
LOOKED = 16  # held-out conversations that a point of the curve is measured on
DRAFTED = 5
"""Steps that a finished head is measured on."""


def train_eagle(
    kind: Trained,
    model: str | Path,
    data: DataSettings | None = None,
    shape: EagleShape | None = None,
    schedule: Schedule | None = None,
    *,
    start: Path | None = None,
    out: Path | None = None,
    prompts: int = 12,
    target: Target | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    watch: Watch | None = None,
) -> HeadFile:
    """Train, measure and write the head of a model; gives the file that the technique ``kind`` finds.

    ``start``: the file of a head to go on from; without one it starts from the model's last layer. ``out``: a
    folder of heads that gets a copy of the file in the cache folder. ``prompts``: held-out prompts
    that the engine answers with the finished head. ``watch`` is shown the learning curve as it grows.

    Raises :class:`ModelError` s, :class:`TrainingError` and ``Cancelled``.
    """
    shape = shape or EagleShape()

    def fits(head: HeadFile, target: Target) -> bool:
        held = {name: tuple(value.shape) for name, value in head.tensors().items() if name != "ids"}
        return held == _shapes(kind, shape, target)

    with course(
        model,
        kind,
        data,
        shape,
        schedule or Schedule(),
        start=Start(start, f"{kind} head", fits),
        target=target,
        progress=progress,
        cancel=cancel,
    ) as way:
        return way.run.copied(_train(way, kind, shape, prompts, watch), out)


def _train(way: Course, kind: Trained, shape: EagleShape, prompts: int, watch: Watch | None) -> HeadFile:
    config = way.target.source.config
    layers = layers_read(kind, config.num_layers)
    captured = layers if kind == "eagle" else (*layers, config.num_layers)
    trained, held = way.load(captured, 0.4, best=True)
    ids = frequent((s.conversation for s in trained), config.vocab_size, VOCAB_LISTED)
    loss = _loss(way, kind, shape, trained, ids)
    model = loss.model

    def look() -> dict[str, Any]:
        found = drafted(loss, held[:LOOKED], max(loss.steps, 2), overlap=False)
        return {f"right_{j + 1}": right for j, right in enumerate(found["full"])}

    facts = way.optimise(model, loss, trained, look, 0.4, 0.9, watch=watch)
    facts |= {
        "features": list(layers),
        "layers": shape.steps if kind == "fasteagle" else 1,
        "vocab": len(loss.kept),
        "held_out": {"conversations": len(held), **drafted(loss, held, _steps(loss), cancel=way.cancel)},
    }
    tensors = {name: value.to(torch.bfloat16) for name, value in model.tensors().items()}
    return way.write(facts, {**tensors, "ids": ids}, RUNS[kind], held, prompts)


def _loss(way: Course, kind: Trained, shape: EagleShape, trained: Sequence[Shown], ids: Tensor) -> EagleLoss:
    """The head's parameters within their loss: as they start, or of the head that is gone on from."""
    target, half, seed = way.target, way.half, way.run.schedule.seed
    config, source, weights = target.source.config, target.source, target.decoder.weights
    rest = (target.decoder, vocabulary_matrix(source), ids, trained)
    start = None
    if way.before is not None:
        start = {name: value.float() for name, value in way.before.tensors().items()}
    if kind == "fasteagle":
        start = start or begin_cascade(config, shape.steps, source, weights, trained, seed)
        return CascadeLoss(Cascade(config, shape.steps, start, half), shape, *rest)
    form = Form.of(kind, config)
    start = start or initial(form, source, weights, trained, seed)
    return EagleLoss(Drafter(form, start, half), shape, *rest)


def _steps(loss: EagleLoss) -> int:
    return loss.steps if isinstance(loss, CascadeLoss) else DRAFTED


def _shapes(kind: Trained, shape: EagleShape, target: Target) -> dict[str, tuple[int, ...]]:
    """Shapes of a head's tensors, by name."""
    config = target.source.config
    if kind == "fasteagle":
        return cascade_shapes(config, shape.steps)
    return Form.of(kind, config).shapes()
