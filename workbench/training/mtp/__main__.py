"""Command line of the small model: ``python -m workbench.training.mtp``.

Stop it at any time; the same command goes on from the last checkpoints. ``--twin`` also trains the same model
without the module, to see what the module's loss costs the model; ``--control`` teaches the module the same
with one pass, to see what is due to being fed with itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from workbench.spec.errors import WorkbenchError
from workbench.training.mtp.build import Plan, build


def main(
    work: Annotated[Path, typer.Option(help="checkpoints and tokens")] = Path("runs/tiny-mtp"),
    data: Annotated[Path, typer.Option(help="where models/ goes, and text/ is")] = Path("data"),
    steps: Annotated[int, typer.Option(help="optimizer steps of model and module")] = 1000,
    recursive: Annotated[int, typer.Option(help="further steps of the module, fed with itself")] = 300,
    twin: Annotated[int, typer.Option(help="steps of the twin without the module, as far as it goes")] = 0,
    control: Annotated[int, typer.Option(help="steps of a module that is not fed with itself")] = 0,
    seed: Annotated[int, typer.Option(help="seed of weights and windows")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 1 is fastest on a busy machine")] = 1,
    note: Annotated[str, typer.Option(help="what the card should say about this run")] = "",
) -> None:
    """Train the shipped model with multi-token prediction, measure it, and write it as a folder."""
    torch.set_num_threads(threads)
    plan = Plan(steps=steps, recursive=recursive, twin=twin, control=control, seed=seed, note=note)
    try:
        build(plan, work, data, said("step"))
    except WorkbenchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error


def said(name: str) -> Callable[[dict[str, float]], None]:
    """Prints points of a learning curve that have ``name``, one JSON object a line."""
    return lambda point: typer.echo(json.dumps(point)) if name in point else None


if __name__ == "__main__":
    typer.run(main)
