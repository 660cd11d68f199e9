"""``workbench train``: a draft head for a model, from the model's own text.

Steps aside for whatever else runs (lowest priority), keeps all it made when it is stopped, and goes on from
there when it is started again with the same options.
"""

from __future__ import annotations

import contextlib
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli import options as o
from workbench.cli.output import Meter, interruptible, out, print_json

if TYPE_CHECKING:
    from workbench.models.heads import HeadFile

_DATA, _TRAINING = "Data", "Training"


class HeadName(StrEnum):
    """Heads that can be trained."""

    medusa = "medusa"


class LossOption(StrEnum):
    """Losses."""

    kl = "kl"
    ce = "ce"
    hybrid = "hybrid"


def train(
    head: Annotated[HeadName, typer.Argument(metavar="WHAT", help="The head: medusa.")],
    target: Annotated[
        str,
        typer.Option("--target", "--model", "-m", help="The model it will draft for: a name or a folder."),
    ] = o.DEFAULT_MODEL,
    tokens: Annotated[
        int,
        typer.Option(min=1, help="Answer tokens that the model makes to train on.", rich_help_panel=_DATA),
    ] = 100_000,
    questions: Annotated[
        int, typer.Option(min=2, max=4096, help="Questions made at once.", rich_help_panel=_DATA)
    ] = 48,
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of the optimizer.", rich_help_panel=_TRAINING)
    ] = 600,
    batch: Annotated[
        int, typer.Option(min=1, max=256, help="Conversations per step.", rich_help_panel=_TRAINING)
    ] = 8,
    lr: Annotated[float, typer.Option(help="Learning rate.", rich_help_panel=_TRAINING)] = 3e-3,
    heads: Annotated[int, typer.Option(min=1, max=8, help="Heads.", rich_help_panel=_TRAINING)] = 4,
    vocab: Annotated[
        int, typer.Option(min=16, help="Most frequent tokens the loss is over.", rich_help_panel=_TRAINING)
    ] = 4096,
    loss: Annotated[
        LossOption,
        typer.Option(
            help="kl: the model's law; ce: its tokens; hybrid: kl, then acceptance.",
            rich_help_panel=_TRAINING,
        ),
    ] = LossOption.kl,
    seed: o.Seed = 0,
    to: Annotated[
        Path | None, typer.Option("--out", "-o", help="A folder of heads that gets a copy, e.g. data/heads.")
    ] = None,
    dtype: o.DType = o.DTypeName.bfloat16,
    threads: o.Threads = None,
    background: Annotated[
        bool, typer.Option("--background/--foreground", help="Whether other programs come first.")
    ] = True,
    json: o.Json = False,
) -> None:
    """Train a draft head; stopped at any time, the same command goes on."""
    o.set_threads(threads)
    if background:
        _step_aside()
    from workbench.training.heads.medusa import Shape
    from workbench.training.heads.optimise import Schedule
    from workbench.training.heads.shards import DataSettings
    from workbench.training.heads.target import open_target
    from workbench.training.heads.train import summary, train_medusa

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with Meter(f"training {head.value}") as meter, interruptible() as cancel:
        made = train_medusa(
            target,
            DataSettings(tokens=tokens, questions=questions),
            Shape(heads=heads, vocab=vocab, loss=loss.value),
            Schedule(steps=steps, batch=batch, lr=lr, seed=seed),
            out=to,
            target=open_target(target, dtype=dtype.value, cancel=cancel.is_set),
            progress=meter,
            cancel=cancel.is_set,
        )
    if json:
        print_json(summary(made))
    else:
        _show(made)


def _step_aside() -> None:
    """Everything else on the machine comes first, where the system knows such a thing."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(19)


def _show(head: HeadFile) -> None:
    from rich.table import Table

    facts: dict[str, Any] = dict(head.facts)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("head", "right", "among 2", "among 5", "among 10"):
        table.add_column(column)
    held = facts["held_out"]
    for k in range(facts["heads"]):
        table.add_row(str(k + 1), *(f"{held[n][k]:.3f}" for n in ("top1", "top2", "top5", "top10")))
    out().print(table)
    for name, run in facts.get("engine", {}).items():
        tau = run["tau"]
        if tau is not None:
            print(f"{name}: {tau:.2f} tokens per step on {run['prompts']} held-out prompts")
    print(f"written to {head.path}")
