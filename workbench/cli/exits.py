"""``workbench train lede``: where to leave a model and how far to draft, learnt from drafts at all exits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from workbench.cli.output import Meter, interruptible, out, print_json
from workbench.spec.plan import DType

if TYPE_CHECKING:
    from workbench.models.heads import HeadFile


def learn_exits(target: str, documents: str, *, seed: int, to: Path | None, dtype: DType, json: bool) -> None:
    """Log, learn and judge, and show what either choice earns on held-out prompts."""
    from workbench.training.heads.target import open_target
    from workbench.training.lede.run import Settings, summary, train_lede

    with Meter("learning exits") as meter, interruptible() as cancel:
        opened = open_target(target, dtype=dtype, cancel=cancel.is_set)
        settings = Settings(documents=documents, seed=seed)
        made = train_lede(target, settings, out=to, target=opened, progress=meter, cancel=cancel.is_set)
    if json:
        print_json(dict(summary(made)))
    else:
        _show(made)


def _show(made: HeadFile) -> None:
    from rich.table import Table

    columns = ("decoding", "choice", "tokens per pass", "accepted", "exit layer", "drafts a round", "used")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    for kind, held in made.facts["held_out"].items():
        table.add_row(kind, "no drafts", "1.000", "–", "–", "0", "")
        for name in ("fixed", "learnt"):
            row = held[name]
            used = "✓" if held["used"] == row else ""
            if "rounds" not in row:
                table.add_row(kind, f"{name}: no drafts", f"{row['rate']:.3f}", "–", "–", "0", used)
                continue
            cells = (row["rate"], row["accepted"], row["mean_exit"], row["mean_drafts"])
            table.add_row(kind, name, *(f"{value:.3f}" for value in cells), used)
    out().print(table)
    print(f"written to {made.path}")
