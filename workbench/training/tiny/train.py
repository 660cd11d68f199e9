"""The training loop: Muon and AdamW, warm-up and cosine, windows that grow to 2,048 tokens.

The budget is minutes of CPU time of the training thread, or a number of steps. Learning
rate and window length follow the share of the budget that is spent, so waiting for a busy
machine costs nothing of it; with steps the run is reproducible.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.training import checkpoint
from workbench.training.errors import TrainingError
from workbench.training.tiny.data import Windows
from workbench.training.tiny.tokenizer import END_OF_TEXT, IM_END, VOCAB_SIZE

WINDOWS = ((0.0, 256), (0.4, 512), (0.75, 1024), (0.92, 2048))
"""(share of the budget from which it holds, window length in tokens)."""


@dataclass(frozen=True)
class Settings:
    """One run. ``minutes`` or ``steps`` is the budget; ``batch_tokens`` per optimizer step."""

    minutes: float = 25.0
    steps: int = 0
    batch_tokens: int = 2048
    peak_lr: float = 2.5e-3
    floor_lr: float = 2e-5
    warmup: float = 0.02
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    save_every_s: float = 60.0
    eval_every_s: float = 60.0
    eval_every_steps: int = 100

    def __post_init__(self) -> None:
        if self.steps < 0 or (self.steps == 0 and self.minutes <= 0):
            raise TrainingError("A run needs a budget: minutes > 0 or steps > 0.")


def llama_config() -> LlamaConfig:
    """The shipped shape: 5 layers of 256, 4 query and 2 key/value heads of 64, tied embedding.

    Widths are powers of two, so Hadamard rotations and groups of 32, 64, 128 all divide.
    """
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=[IM_END, END_OF_TEXT],
        pad_token_id=END_OF_TEXT,
    )


def build(config: LlamaConfig, settings: Settings) -> tuple[LlamaForCausalLM, list[torch.optim.Optimizer]]:
    """A freshly initialised float32 model and its optimizers.

    Muon for the matrices of the layers (Jordan et al. 2024; updates scaled to the size of
    AdamW's, so that both share one learning rate): in the first 400 steps of one seed it
    reached AdamW's held-out loss in less than half of the steps. AdamW without decay for
    the embedding and the norms.
    """
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(config)
    return model, optimizers_for(model, settings)


def optimizers_for(model: nn.Module, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for matrices but the embedding, AdamW for the rest of what is trained."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    inner = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in named if p.ndim != 2 or "embed" in name]
    lr, decay = settings.peak_lr, settings.weight_decay
    muon = torch.optim.Muon(inner, lr=lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(outer, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    return [muon, adamw]


def run_key(settings: Settings, fingerprint: str) -> str:
    """What a checkpoint must share with the run that goes on from it: corpus and settings.

    Not the budget: a run may be given more time, or be brought to its end early.
    """
    shaping = ("batch_tokens", "peak_lr", "floor_lr", "warmup", "weight_decay", "clip", "seed")
    return f"{fingerprint} {[(name, getattr(settings, name)) for name in shaping]}"


def learning_rate(settings: Settings, share: float) -> float:
    """Linear warm-up, then a cosine to ``floor_lr``; ``share`` in [0, 1] of the budget."""
    if share < settings.warmup:
        return settings.peak_lr * (share / settings.warmup) + 1e-6
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (share - settings.warmup) / (1 - settings.warmup))))
    return settings.floor_lr + (settings.peak_lr - settings.floor_lr) * cosine


def window_length(share: float) -> int:
    """Tokens per window at this share of the budget."""
    return next(length for start, length in reversed(WINDOWS) if share >= start)


def mean_loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Mean next-token loss in nats over int64 ``[N, T]``, two windows at a time."""
    losses = []
    with torch.inference_mode():
        for rows in torch.split(windows, 2):
            losses.append(float(model(input_ids=rows, labels=rows, use_cache=False).loss))
    return sum(losses) / len(losses)


def train(
    settings: Settings,
    config: LlamaConfig,
    corpus: Windows,
    held_out: Tensor,
    folder: Path,
    fingerprint: str,
    on_point: Callable[[dict[str, float]], None] = lambda point: None,
) -> tuple[LlamaForCausalLM, checkpoint.Progress]:
    """Train, or go on from the checkpoint in ``folder``; returns the model and its progress.

    ``held_out`` is int64 ``[N, T]``; its loss is one column of the learning curve.
    """
    model, optimizers = build(config, settings)
    progress = checkpoint.restore(folder, model, optimizers, run_key(settings, fingerprint))

    def loss(rows: Tensor, share: float) -> Tensor:
        # In a CPU training step the flash kernel pays off beyond 512 tokens only.
        model.set_attn_implementation("eager" if rows.shape[1] <= 512 else "sdpa")
        found: Tensor = model(input_ids=rows, labels=rows, use_cache=False).loss
        return found

    def measure() -> dict[str, float]:
        return {"held_out_loss": mean_loss(model, held_out)}

    run(model, optimizers, progress, settings, corpus, loss, measure, folder, on_point)
    return model, progress


def run(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    progress: checkpoint.Progress,
    settings: Settings,
    corpus: Windows,
    loss: Callable[[Tensor, float], Tensor],
    measure: Callable[[], dict[str, float]],
    folder: Path,
    on_point: Callable[[dict[str, float]], None],
    until: int = 0,
) -> None:
    """Spend what is left of the budget on ``model`` in place, with checkpoints in ``folder``.

    ``loss(rows, share)`` is that of int64 ``[N, T]`` at a share of the budget, under autocast; ``measure()``
    gives further columns of the learning curve. ``until``: the step behind which the run is left, its
    schedule unfinished; 0: none.
    """
    last_save = last_eval = progress.seconds
    recent = progress.curve[-1]["train_loss"] if progress.curve else None
    while (share := _share(settings, progress)) < 1.0 and (not until or progress.step < until):
        started = time.thread_time()
        length = window_length(share)
        rows = corpus.batch(progress.windows, max(1, settings.batch_tokens // length), length)
        lr = learning_rate(settings, share)
        found = _step(model, optimizers, lambda rows=rows, share=share: loss(rows, share), lr, settings.clip)
        recent = found if recent is None else 0.98 * recent + 0.02 * found
        progress.step += 1
        progress.windows += len(rows)
        progress.tokens += rows.numel()
        progress.seconds += time.thread_time() - started
        done = _share(settings, progress) >= 1.0 or progress.step == until
        if settings.steps:
            due = progress.step % settings.eval_every_steps == 0
        else:
            due = progress.seconds - last_eval >= settings.eval_every_s
        if due or done:
            last_eval = progress.seconds
            progress.curve.append(_point(progress, lr, length, recent, measure()))
            on_point(progress.curve[-1])
        if progress.seconds - last_save >= settings.save_every_s or done:
            last_save = progress.seconds
            checkpoint.save(folder, model, optimizers, progress)


def _share(settings: Settings, progress: checkpoint.Progress) -> float:
    return progress.step / settings.steps if settings.steps else progress.seconds / (60 * settings.minutes)


def _step(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss: Callable[[], Tensor],
    lr: float,
    clip: float,
) -> float:
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr
    with torch.autocast("cpu", torch.bfloat16):
        found = loss()
    found.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(found.detach())


def _point(
    progress: checkpoint.Progress, lr: float, length: int, train_loss: float, measured: dict[str, float]
) -> dict[str, float]:
    return {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "lr": round(lr, 8),
        "window": length,
        "train_loss": round(train_loss, 4),
        **{name: round(value, 4) for name, value in measured.items()},
    }
