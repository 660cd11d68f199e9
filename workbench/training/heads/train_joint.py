"""From a model's name to another model and the heads that draft for it (Medusa-2): one folder, one file.

    from workbench.training.heads.train_joint import train_joint
    folder, head = train_joint("tiny", Path("tiny-medusa2"), DataSettings(tokens=20_000))

The folder is a model like any other, to be named wherever a model is; the head is found for it. It says other
things than the model it was made of: the facts of the head say how far the two are apart.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from workbench.models.cache import new_folder
from workbench.models.convert import save_weights
from workbench.models.folder import read_json
from workbench.models.heads import HeadFile
from workbench.models.progress import Cancel, Progress, report
from workbench.models.registry import resolve
from workbench.spec.errors import OptionError, StorageError
from workbench.training.heads.capture import capture
from workbench.training.heads.course import Course, course
from workbench.training.heads.medusa import MedusaHeads, vocabulary_matrix
from workbench.training.heads.medusa2 import Joint, JointLoss, JointShape
from workbench.training.heads.optimise import Schedule
from workbench.training.heads.pruned import Pruned, layer_tensors
from workbench.training.heads.rows import Rows, frequent
from workbench.training.heads.run import VOCAB_KEPT, Run
from workbench.training.heads.shards import DataSettings, Shards
from workbench.training.heads.target import Target, open_target
from workbench.training.heads.train import finish

KIND = "medusa"
LOOKED = 8  # held-out conversations that a point of the curve is measured on
_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "generation_config.json", "vocab.json", "merges.txt")


def train_joint(
    model: str | Path,
    folder: Path,
    data: DataSettings | None = None,
    shape: JointShape | None = None,
    schedule: Schedule | None = None,
    *,
    prompts: int = 12,
    target: Target | None = None,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> tuple[Path, HeadFile]:
    """Train a copy of a model with Medusa heads; gives the new model's ``folder`` and its head.

    Raises :class:`OptionError` when the folder is there already, :class:`StorageError` when it cannot be
    made, :class:`ModelError` s, :class:`TrainingError` and ``Cancelled``.
    """
    _require_room(folder)
    shape, schedule = shape or JointShape(), schedule or Schedule(lr=1e-3)
    with course(
        model, "joint", data, shape, schedule, target=target, progress=progress, cancel=cancel
    ) as way:
        return _train(way, folder, shape, prompts)


def _require_room(folder: Path) -> None:
    """That a folder can be made, before hours are spent on what goes into it."""
    if folder.exists():
        raise OptionError(f"{folder} is there already.", hint="Name a folder that is not.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent):
            pass
    except OSError as error:
        raise StorageError(
            f"The model cannot be written to {folder}: {error.strerror}.", hint="Name another folder."
        ) from None


def _train(way: Course, folder: Path, shape: JointShape, prompts: int) -> tuple[Path, HeadFile]:
    run, target, source = way.run, way.target, way.target.source
    config = source.config
    trained, held = way.load((config.num_layers,), 0.3)
    ids = frequent((s.conversation for s in trained), config.vocab_size, VOCAB_KEPT)
    backbone = Pruned(config, layer_tensors(source, range(config.num_layers)), way.half)
    joint = Joint(backbone, MedusaHeads(shape.own, config.hidden_size, run.schedule.seed))
    loss = JointLoss(joint, shape, target.decoder, vocabulary_matrix(source), ids, trained)

    def look() -> dict[str, float]:
        return loss.looked(held[:LOOKED])

    trained_on = way.optimise(joint, loss, trained, look, 0.3, 0.8, slower={"backbone": shape.slower})
    report(way.progress, 0.8, "writing the model")
    write_model(folder, run, joint.backbone)
    made = open_target(folder, dtype=target.plan.dtype, numerics=target.plan.numerics, cancel=way.cancel)
    apart = {n: v for n, v in loss.looked(held).items() if not n.startswith("top1")}
    facts: dict[str, Any] = {
        "heads": shape.heads,
        **trained_on,
        "target": folder.name,
        "made_of": {"target": Path(run.model).name, "fingerprint": source.fingerprint, **apart},
    }
    texts = [s.conversation.ids for s in held]
    shown = capture(made.decoder, made.attention(), texts, (config.num_layers,))
    rows = [
        Rows.of(s.conversation, streams[0].to(torch.bfloat16).clone())
        for s, streams in zip(held, shown, strict=True)
    ]
    of_made = Run(folder, KIND, Shards(made, run.shards.settings), shape, run.schedule)
    last = Course(of_made, progress=way.progress, cancel=way.cancel)
    return folder, finish(last, joint.heads, ids, rows, facts, prompts)


def write_model(folder: Path, run: Run, backbone: Pruned) -> None:
    """The model's folder, with the layers of ``backbone`` in place of its own; whole or not at all."""
    source, origin = run.shards.target.source, resolve(run.model)
    new = backbone.tensors()
    tensors = {
        name: new[name].to(source.tensor(name).dtype) if name in new else source.tensor(name)
        for name in source.names()
    }
    with new_folder(folder) as unfinished:
        for pattern in _TOKENIZER:
            for path in origin.glob(pattern):
                shutil.copy(path, unfinished)
        save_weights(unfinished, tensors, read_json(origin, "config.json"))
