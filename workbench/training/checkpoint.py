"""Checkpoints without pickle: safetensors for tensors, JSON for the rest.

A checkpoint is a folder that appears whole or not at all (written beside its place, then
renamed), so a run may be stopped at any moment.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from workbench.spec.errors import StorageError
from workbench.training.errors import CheckpointMismatch


@dataclass
class Progress:
    """Where a run stands. ``seconds`` is CPU time of the training thread."""

    fingerprint: str
    step: int = 0
    windows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def save(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], progress: Progress) -> None:
    """Write parameters, moments of the optimizers and progress to ``folder``.

    Raises :class:`StorageError` where that cannot be; the older checkpoint is still there then.
    """
    try:
        _save(folder, model, optimizers, progress)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"The checkpoint {folder} cannot be written: {error}.", hint="Free some space and start again."
        ) from None


def _save(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], progress: Progress) -> None:
    fresh, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.mkdir(parents=True)
    named = dict(model.named_parameters())
    save_file({name: p.detach().contiguous() for name, p in named.items()}, fresh / "model.safetensors")
    moments = {
        f"{name}/{key}": value
        for name, parameter in named.items()
        for optimizer in optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    save_file(moments, fresh / "optimizer.safetensors")
    (fresh / "progress.json").write_text(json.dumps(asdict(progress), indent=1))
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def restore(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], fingerprint: str) -> Progress:
    """Load a checkpoint in place; a fresh Progress if there is none.

    Raises CheckpointMismatch if it belongs to a run with another fingerprint, or cannot be read.
    """
    try:
        return _restore(folder, model, optimizers, fingerprint)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointMismatch(
            f"The checkpoint {folder} is damaged: {error}.", hint="Remove that folder and start again."
        ) from None


def _restore(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], fingerprint: str) -> Progress:
    old = folder.with_name(folder.name + ".old")
    if not folder.exists() and old.exists():
        old.rename(folder)  # stopped between the two renames of `save`
    if not (folder / "progress.json").is_file():
        return Progress(fingerprint)
    progress = Progress(**json.loads((folder / "progress.json").read_text()))
    if progress.fingerprint != fingerprint:
        raise CheckpointMismatch(
            f"{folder.name} holds a run with other settings or another corpus.",
            hint="Use another work folder, or remove the checkpoint.",
        )
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in load_file(folder / "model.safetensors").items():
            named[name].copy_(value)
    owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
    for key, value in load_file(folder / "optimizer.safetensors").items():
        name, moment = key.rsplit("/", 1)
        owner[named[name]].state[named[name]][moment] = value
    return progress
