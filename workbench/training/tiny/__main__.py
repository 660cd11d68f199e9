"""Command line of the tiny model: ``python -m workbench.training.tiny --fetch --minutes 30``.

Stop it at any time; the same command goes on from the last checkpoint. ``--export-only``
writes the model folder from the checkpoint as it stands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from workbench.spec.errors import WorkbenchError
from workbench.training import checkpoint
from workbench.training.corpus import fetch
from workbench.training.errors import TrainingError
from workbench.training.tiny.export import write_model
from workbench.training.tiny.prepare import Corpus, prepare, write_data
from workbench.training.tiny.train import Settings, build, llama_config, run_key, train


def main(
    work: Annotated[Path, typer.Option(help="checkpoints, tokens and fetched packages")] = Path("runs/tiny"),
    data: Annotated[Path, typer.Option(help="where models/, text/ and prompts/ go")] = Path("data"),
    minutes: Annotated[float, typer.Option(help="minutes of CPU time to train")] = 30.0,
    steps: Annotated[int, typer.Option(help="optimizer steps instead of minutes (reproducible)")] = 0,
    seed: Annotated[int, typer.Option(help="seed of weights, windows and chat samples")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 1 is fastest on a busy machine")] = 1,
    get_sources: Annotated[bool, typer.Option("--fetch", help="download the text packages first")] = False,
    note: Annotated[str, typer.Option(help="what the card should say about this run")] = "",
    export_only: Annotated[bool, typer.Option(help="export the checkpoint without training")] = False,
) -> None:
    """Train the shipped tiny model and write it as a Hugging Face folder."""
    torch.set_num_threads(threads)
    try:
        settings = Settings(minutes=minutes, steps=steps, seed=seed)
        if get_sources:
            fetch(work / "sources")
        corpus = prepare(work, seed)
        write_data(work, data, corpus, seed)
        run(corpus, settings, work, data, export_only, note)
    except WorkbenchError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(error.exit_code) from error


def run(
    corpus: Corpus, settings: Settings, work: Path, data: Path, export_only: bool = False, note: str = ""
) -> None:
    """Train (or load the checkpoint of ``work``) and export to ``data/models/tiny``."""
    if export_only:
        model, optimizers = build(llama_config(), settings)
        key = run_key(settings, corpus.fingerprint)
        progress = checkpoint.restore(work / "checkpoint", model, optimizers, key)
        if progress.step == 0:
            raise TrainingError("There is no checkpoint to export.", hint="Train without --export-only.")
    else:
        model, progress = train(
            settings,
            llama_config(),
            corpus.windows,
            corpus.held_out_windows(),
            work / "checkpoint",
            corpus.fingerprint,
            lambda point: typer.echo(json.dumps(point)),
        )
    write_model(data / "models/tiny", model, corpus, progress, settings, data / "text", note)


if __name__ == "__main__":
    typer.run(main)
