"""The two trainings of the small model: jointly with its modules, then the module fed with its own output.

The loop, its schedule and its checkpoints are those of the shipped tiny model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from workbench.training import checkpoint
from workbench.training.heads.losses import LossName
from workbench.training.mtp.model import (
    BETAS,
    MTPModel,
    Passes,
    joint_loss,
    next_token_loss,
    recursive_loss,
)
from workbench.training.tiny.data import Windows
from workbench.training.tiny.train import Settings, optimizers_for, run, run_key

OnPoint = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Joint:
    """How many modules, and the weight λ of their loss: ``high``, then ``low`` from ``fall`` on."""

    modules: int = 1
    high: float = 0.3
    low: float = 0.1
    fall: float = 0.67

    def weight(self, share: float) -> float:
        """λ at a share of the training."""
        return self.high if share < self.fall else self.low


@dataclass(frozen=True)
class Recursive:
    """The weights β of the passes, which say how many there are, and what is learnt from."""

    betas: tuple[float, ...] = BETAS
    loss: LossName = "kl"


def train_joint(
    settings: Settings,
    joint: Joint,
    config: LlamaConfig,
    corpus: Windows,
    held_out: Tensor,
    folder: Path,
    fingerprint: str,
    on_point: OnPoint = lambda point: None,
    until: int = 0,
) -> tuple[MTPModel, checkpoint.Progress]:
    """Train model and modules, or go on from the checkpoint in ``folder``; ``until``: see :func:`run`."""
    model = MTPModel(config, joint.modules, settings.seed)
    optimizers = optimizers_for(model, settings)
    key = f"{run_key(settings, fingerprint)} {joint}"
    progress = checkpoint.restore(folder, model, optimizers, key)

    def loss(rows: Tensor, share: float) -> Tensor:
        return joint_loss(model.chain(rows), rows, joint.weight(share))

    run(
        model,
        optimizers,
        progress,
        settings,
        corpus,
        loss,
        lambda: scores(model.chain, held_out),
        folder,
        on_point,
        until,
    )
    return model, progress


def train_recursive(
    model: MTPModel,
    settings: Settings,
    recursive: Recursive,
    corpus: Windows,
    held_out: Tensor,
    folder: Path,
    fingerprint: str,
    on_point: OnPoint = lambda point: None,
    until: int = 0,
) -> checkpoint.Progress:
    """Train the modules of ``model`` in place with everything else frozen; resumable like the other."""
    depth = len(recursive.betas)
    with _frozen(model):
        optimizers = optimizers_for(model.mtp, settings)
        key = f"{run_key(settings, fingerprint)} {recursive}"
        progress = checkpoint.restore(folder, model.mtp, optimizers, key)

        def loss(rows: Tensor, share: float) -> Tensor:
            return recursive_loss(model.recursion(rows, depth), rows, recursive.betas, recursive.loss, share)

        run(
            model.mtp,
            optimizers,
            progress,
            settings,
            corpus,
            loss,
            lambda: scores(lambda rows: model.recursion(rows, depth), held_out),
            folder,
            on_point,
            until,
        )
    return progress


def scores(passes_of: Callable[[Tensor], Passes], windows: Tensor) -> dict[str, float]:
    """Main loss in nats over int64 [N, T]; of each module or pass its loss, and how often its likeliest token
    is the main model's."""
    sums: dict[str, float] = {}
    batches = torch.split(windows, 2)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for rows in batches:
            passes = passes_of(rows)
            found = {"held_out_loss": next_token_loss(passes.main, rows)}
            best = passes.main.argmax(-1)
            for d, logits in enumerate(passes.drafts):
                found[f"mtp{d + 1}_loss"] = next_token_loss(logits, rows, d)
                found[f"mtp{d + 1}_same"] = (logits.argmax(-1) == best)[:, d:].float().mean()
            for name, value in found.items():
                sums[name] = sums.get(name, 0.0) + float(value) / len(batches)
    return sums


@contextmanager
def _frozen(model: MTPModel) -> Iterator[None]:
    for parameter in model.main.parameters():
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in model.main.parameters():
            parameter.requires_grad_(True)
