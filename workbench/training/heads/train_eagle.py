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
from workbench.models.heads import HeadFile, read_head, write_head
from workbench.models.progress import Cancel, Progress, part, report
from workbench.spec.errors import HeadMismatch
from workbench.training.heads.cascade import Cascade, CascadeLoss, begin_cascade, cascade_shapes
from workbench.training.heads.drafted import drafted
from workbench.training.heads.drafter import Drafter, Form, Kind, layers_read
from workbench.training.heads.eagle import EagleLoss, EagleShape
from workbench.training.heads.evaluate import GREEDY, SAMPLED, asked_of, measured
from workbench.training.heads.initial import initial
from workbench.training.heads.medusa import vocabulary_matrix
from workbench.training.heads.optimise import Schedule, Watch, optimise
from workbench.training.heads.rows import Shown, frequent, load
from workbench.training.heads.run import VOCAB_LISTED, Run, shards_of
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
_KEPT = ("recipe", "trained", "curve", "before")  # facts of the head that one goes on from
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
    data, shape, schedule = data or DataSettings(), shape or EagleShape(), schedule or Schedule()
    with shards_of(model, data, target, progress, cancel) as shards:
        begun = None if start is None else _begun(start, kind, shape, shards.target)
        run = Run(model, kind, shards, shape, schedule, "" if begun is None else begun.digest)
        made = _train(run, kind, shape, begun, prompts, progress, cancel, watch)
        return run.copied(made, out)


def _train(
    run: Run,
    kind: Trained,
    shape: EagleShape,
    begun: HeadFile | None,
    prompts: int,
    progress: Progress | None,
    cancel: Cancel | None,
    watch: Watch | None,
) -> HeadFile:
    target, schedule = run.shards.target, run.schedule
    config = target.source.config
    layers = layers_read(kind, config.num_layers)
    captured = layers if kind == "eagle" else (*layers, config.num_layers)
    trained, held = load(run.shards, captured, part(progress, 0.02, 0.4), cancel, best=True)
    ids = frequent((s.conversation for s in trained), config.vocab_size, VOCAB_LISTED)
    loss = _loss(kind, shape, target, trained, ids, schedule.seed, begun)
    model = loss.model

    def look() -> dict[str, Any]:
        found = drafted(loss, held[:LOOKED], max(loss.steps, 2), overlap=False)
        return {f"right_{j + 1}": right for j, right in enumerate(found["full"])}

    state = optimise(
        model,
        loss,
        len(trained),
        schedule,
        run.folder(len(trained)),
        run.key(len(trained)),
        look,
        part(progress, 0.4, 0.9),
        cancel,
        watch=watch,
    )
    report(progress, 0.9, "measuring")
    facts: dict[str, Any] = {
        **run.facts([s.conversation for s in trained], state),
        "features": list(layers),
        "layers": shape.steps if kind == "fasteagle" else 1,
        "vocab": len(loss.kept),
        "held_out": {"conversations": len(held), **drafted(loss, held, _steps(loss), cancel=cancel)},
    }
    if begun is not None:
        facts["before"] = {n: v for n, v in begun.facts.items() if n in _KEPT}
    tensors = {name: value.to(torch.bfloat16) for name, value in model.tensors().items()}
    fingerprint = target.source.fingerprint
    write_head(run.path, kind, fingerprint, facts, {**tensors, "ids": ids})
    asked = asked_of((s.conversation for s in held), prompts)
    if asked:
        facts["engine"] = measured(target, RUNS[kind], asked, part(progress, 0.92, 1.0), cancel)
        write_head(run.path, kind, fingerprint, facts, {**tensors, "ids": ids})
    return read_head(run.path)


def _loss(
    kind: Trained,
    shape: EagleShape,
    target: Target,
    trained: Sequence[Shown],
    ids: Tensor,
    seed: int,
    begun: HeadFile | None,
) -> EagleLoss:
    """The head's parameters within their loss: as they start, or of the head that is gone on from."""
    config, source, weights = target.source.config, target.source, target.decoder.weights
    half = torch.bfloat16 if target.plan.dtype == "bfloat16" else None
    rest = (target.decoder, vocabulary_matrix(source), ids, trained)
    start = None
    if begun is not None:
        start = {name: value.float() for name, value in begun.tensors().items()}
    if kind == "fasteagle":
        start = start or begin_cascade(config, shape.steps, source, weights, trained, seed)
        return CascadeLoss(Cascade(config, shape.steps, start, half), shape, *rest)
    form = Form.of(kind, config)
    start = start or initial(form, source, weights, trained, seed)
    return EagleLoss(Drafter(form, start, half), shape, *rest)


def _steps(loss: EagleLoss) -> int:
    return loss.steps if isinstance(loss, CascadeLoss) else DRAFTED


def _begun(path: Path, kind: Trained, shape: EagleShape, target: Target) -> HeadFile:
    """The head to go on from. Raises :class:`HeadMismatch` for one of another kind, model or size."""
    found = read_head(path)
    config = target.source.config
    if kind == "fasteagle":  # noqa: SIM108 - the other form is of its kinds alone
        shapes = cascade_shapes(config, shape.steps)
    else:
        shapes = Form.of(kind, config).shapes()
    held = {name: tuple(value.shape) for name, value in found.tensors().items() if name != "ids"}
    if found.kind != kind or found.fingerprint != target.source.fingerprint or held != shapes:
        raise HeadMismatch(
            f"{path} is no {kind} head of this model's weights to go on from.",
            hint="Start without it, or from a head that was trained for this model.",
        )
    return found
