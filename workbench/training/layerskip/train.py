"""The training of a model that may be left early; loop, schedule and checkpoints are the tiny model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from transformers import LlamaConfig

from workbench.training import checkpoint
from workbench.training.errors import TrainingError
from workbench.training.layerskip.model import ExitModel, by_layer, dropped, exit_loss
from workbench.training.layerskip.schedule import Recipe, dropout_rates, loss_weights
from workbench.training.tiny.data import Windows
from workbench.training.tiny.train import Settings, optimizers_for, run, run_key


def train(
    settings: Settings,
    recipe: Recipe,
    config: LlamaConfig,
    corpus: Windows,
    held_out: Tensor,
    folder: Path,
    fingerprint: str,
    on_point: Callable[[dict[str, float]], None] = lambda point: None,
    until: int = 0,
) -> tuple[ExitModel, checkpoint.Progress]:
    """Train, or go on from the checkpoint in ``folder``; ``until``: see :func:`run`.

    Raises :class:`TrainingError` for a budget in minutes: schedules follow the step.
    """
    if not settings.steps:
        raise TrainingError("Layer dropout and exit losses follow the step.", hint="Set steps.")
    model = ExitModel(config, settings.seed)
    optimizers = optimizers_for(model, settings)
    progress = checkpoint.restore(
        folder, model, optimizers, f"{run_key(settings, fingerprint)} {settings.steps} {recipe}"
    )

    def loss(rows: Tensor, share: float) -> Tensor:
        step = progress.step
        rates = dropout_rates(recipe, model.layers, step, settings.steps)
        left_out = dropped(rates, len(rows), step, settings.seed) if any(rates) else None
        return exit_loss(model, rows, left_out, loss_weights(recipe, model.layers, step, settings.steps))

    def measure() -> dict[str, float]:
        found = by_layer(model, held_out)
        same = {f"same{layer + 1}": row["same"] for layer, row in enumerate(found[:-1])}
        return {"held_out_loss": found[-1]["loss"], **same}

    run(model, optimizers, progress, settings, corpus, loss, measure, folder, on_point, until)
    return model, progress
