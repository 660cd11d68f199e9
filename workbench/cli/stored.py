"""``workbench runs``, ``compare`` and ``export``: what was measured before, side by side or as a report.

Runs are named by any unique beginning of their id, or ``last``.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from workbench.cli import options as o
from workbench.cli.output import out, print_json
from workbench.spec.errors import RecordError

if TYPE_CHECKING:
    from workbench.spec.run import Run

Ids = Annotated[list[str], typer.Argument(metavar="RUN…", help="Ids, unique beginnings of ids, or: last.")]


def list_runs(
    model: Annotated[str, typer.Option(help="Only runs of this model.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    json: o.Json = False,
) -> None:
    """The runs kept in the run store, newest first."""
    from workbench.records.store import RunStore

    rows = [asdict(r) for r in RunStore().list(model=model or None, limit=limit)]
    if json:
        print_json({"runs": rows})
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("id", "created (UTC)", "kind", "model", "recipe", "state"):
        table.add_column(column)
    for row in rows:
        row["id"], row["created"] = row["id"][:8], row["created"][:19].replace("T", " ")
        table.add_row(*(Text(str(row[c])) for c in ("id", "created", "kind", "model", "recipe", "state")))
    out().print(table if rows else "no runs yet: workbench run --prompt …")


def compare_runs(runs: Ids, json: o.Json = False) -> None:
    """Two or more runs side by side; each is compared with the first."""
    from workbench.records.compare import compare, to_text

    if len(runs) < 2:
        raise RecordError("There is nothing to compare with.", hint="Name two runs or more: workbench runs")
    found = load_runs(runs)
    made = [compare(found[0], other) for other in found[1:]]
    if json:
        print_json({"base": found[0].id, "comparisons": [c.to_dict() for c in made]})
        return
    print(to_text(made))


def export_runs(
    runs: Ids,
    to: Annotated[Path, typer.Option("--out", "-o", help="A file ending in .html or .json.")],
    json: o.Json = False,
) -> None:
    """Runs as one self-contained HTML report, or as JSON."""
    from workbench.records.export import export_html, export_json

    found = load_runs(runs)
    writers = {".html": export_html, ".json": export_json}
    writer = writers.get(to.suffix.lower())
    if writer is None:
        raise RecordError(
            f"{str(to)!r} is neither a .html nor a .json file.", hint="Choose one of the two endings."
        )
    writer(found, to)
    if json:
        print_json({"file": str(to), "bytes": to.stat().st_size, "runs": [r.id for r in found]})
    else:
        print(f"{len(found)} run{'s' * (len(found) > 1)} written to {to}")


def load_runs(ids: list[str]) -> list[Run]:
    """The runs of these ids. Raises :class:`RecordError` for one that is not there or not unique."""
    from workbench.records.store import RunStore

    store = RunStore()
    found = []
    for wanted in ids:
        run = store.last() if wanted == "last" else store.get(wanted)
        if run is None:
            raise RecordError("The run store is empty.", hint="Make a run: workbench run --prompt TEXT")
        found.append(run)
    return found
