"""The training loop of every head: AdamW, warm-up, cosine, clipping, checkpoints, a learning curve.

A run is a function of its key and step numbers alone: which conversations a step sees, its learning rate, its
share of the whole. Stopped and started again it ends with the same bits.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workbench.models.progress import Cancel, Progress, report
from workbench.spec.errors import Cancelled, OptionError, StorageError
from workbench.training import checkpoint
from workbench.training.errors import TrainingError
from workbench.training.heads.heap import give_back

LARGEST_BATCH = 256


@dataclass(frozen=True)
class Schedule:
    """``batch`` conversations per step; ``lr`` falls to a twentieth. ``seed`` shuffles and initialises."""

    steps: int = 600
    batch: int = 8
    lr: float = 3e-3
    warmup: float = 0.05
    decay: float = 0.01
    clip: float = 0.5
    seed: int = 0
    save_every: int = 50
    look_every: int = 50

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise OptionError(f"lr = {self.lr!r} is no learning rate.", hint="Choose one above 0.")
        if not 1 <= self.batch <= LARGEST_BATCH:
            raise OptionError(
                f"batch = {self.batch!r} conversations do not go into one step.",
                hint=f"Choose 1 to {LARGEST_BATCH}: a step holds the logits of all of them.",
            )

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a cosine."""
        warm = max(1.0, self.warmup * self.steps)
        if step < warm:
            return self.lr * (step + 1) / warm
        along = (step - warm) / max(1.0, self.steps - warm)
        return self.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * along)))

    def chosen(self, step: int, count: int) -> list[int]:
        """Numbers below ``count`` that a step trains on: whole passes in an order of their own each."""
        size = min(self.batch, count)  # none twice in a step
        first = step * size
        out = []
        for n in range(first, first + size):
            epoch, at = divmod(n, count)
            generator = torch.Generator().manual_seed((self.seed << 20) + epoch)
            out.append(int(torch.randperm(count, generator=generator)[at]))
        return out


Loss = Callable[[list[int], float], tuple[Tensor, int]]
"""``loss(numbers, share)``: mean loss of these conversations, and how many tokens it is the mean of."""

Watch = Callable[[Sequence[Mapping[str, float]]], None]
"""``watch(curve)``: the learning curve so far, whenever a point is added, and when a run goes on."""


def optimise(
    model: nn.Module,
    loss: Loss,
    count: int,
    schedule: Schedule,
    folder: Path,
    key: str,
    look: Callable[[], Mapping[str, float]],
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    *,
    slower: Mapping[str, float] | None = None,
    watch: Watch | None = None,
) -> checkpoint.Progress:
    """Train ``model`` in place, or go on from the checkpoint in ``folder``; ``curve.json`` there grows.

    ``look`` measures what a point of the curve shows; ``slower``: factors of the learning rate, by how names
    of parameters begin. Raises ``Cancelled`` between two steps, a checkpoint
    written, :class:`CheckpointMismatch` when the folder holds a run with another ``key``,
    :class:`TrainingError` for a loss that is not finite and :class:`StorageError` for a full disk.
    """
    optimizer = torch.optim.AdamW(
        _groups(model, slower or {}), lr=schedule.lr, betas=(0.9, 0.95), weight_decay=schedule.decay
    )
    state = checkpoint.restore(folder, model, [optimizer], key)
    if watch is not None:
        watch(tuple(state.curve))
    while state.step < schedule.steps:
        if cancel is not None and cancel():
            checkpoint.save(folder, model, [optimizer], state)
            raise Cancelled(
                f"Training stopped at step {state.step} of {schedule.steps}.",
                hint="The same command goes on from there.",
            )
        started = time.thread_time()
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(state.step) * group["factor"]
        numbers = schedule.chosen(state.step, count)
        value, tokens = loss(numbers, state.step / schedule.steps)
        seen = float(value.detach())
        if not math.isfinite(seen):
            raise TrainingError(
                f"The loss of step {state.step + 1} is {seen}.",
                hint=f"Choose a learning rate below {schedule.lr:g}; the last checkpoint is from before.",
            )
        optimizer.zero_grad(set_to_none=True)
        value.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
        optimizer.step()
        state.step += 1
        state.windows += len(numbers)
        state.tokens += tokens
        state.seconds += time.thread_time() - started
        done = state.step == schedule.steps
        if state.step % schedule.look_every == 0 or done:
            point = {"step": state.step, "tokens": state.tokens, "loss": round(seen, 4), **look()}
            state.curve.append(point)
            _write_curve(folder, state)
            if watch is not None:
                watch(tuple(state.curve))
        if state.step % schedule.save_every == 0 or done:
            checkpoint.save(folder, model, [optimizer], state)
            give_back()
        report(progress, state.step / schedule.steps, f"step {state.step}, loss {seen:.3f}")
    return state


def _groups(model: nn.Module, slower: Mapping[str, float]) -> list[dict[str, Any]]:
    """Parameters of one learning rate together."""
    by_factor: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        factor = next((f for start, f in slower.items() if name.startswith(start)), 1.0)
        by_factor.setdefault(factor, []).append(parameter)
    return [{"params": params, "factor": factor} for factor, params in by_factor.items()]


def _write_curve(folder: Path, state: checkpoint.Progress) -> None:
    """Beside the checkpoint, so that a run can be watched."""
    path = folder.with_name(folder.name + "-curve.json")
    unfinished = path.with_suffix(".part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(state.curve, indent=1))
        unfinished.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}.", hint="Free some space.") from None
