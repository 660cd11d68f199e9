"""Command line of the model that may be left early: ``python -m workbench.training.layerskip``.

Stop it at any time; the same command goes on from the last checkpoints. ``--twin`` also trains the same model
without layer dropout and early losses, to see what they change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from workbench.spec.errors import WorkbenchError
from workbench.training.layerskip.build import Plan, build
from workbench.training.mtp.__main__ import said


def main(
    work: Annotated[Path, typer.Option(help="checkpoints and tokens")] = Path("runs/tiny-exit"),
    data: Annotated[Path, typer.Option(help="where models/ goes, and text/ is")] = Path("data"),
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 1000,
    twin: Annotated[int, typer.Option(help="steps of the twin without the recipe, as far as it goes")] = 0,
    seed: Annotated[int, typer.Option(help="seed of weights, windows and dropped layers")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 1 is fastest on a busy machine")] = 1,
    note: Annotated[str, typer.Option(help="what the card should say about this run")] = "",
) -> None:
    """Train a model that may be left early, measure every exit, and write it as a folder."""
    torch.set_num_threads(threads)
    try:
        build(Plan(steps=steps, twin=twin, seed=seed, note=note), work, data, said("step"))
    except WorkbenchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error


if __name__ == "__main__":
    typer.run(main)
