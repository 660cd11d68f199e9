"""What this machine can run, what it cannot, and what to do about it.

``report()`` is the whole answer as plain data; ``workbench doctor`` prints it, and so does ``python -m
workbench.cli.doctor``, also where the rest of the command line cannot be imported. Nothing is downloaded,
installed or allocated on a device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from workbench.cli.finding import Finding
from workbench.cli.probe_hardware import probe_cores, probe_disk, probe_gpu, probe_isa, probe_memory
from workbench.cli.probe_software import (
    probe_browser,
    probe_compiler,
    probe_core,
    probe_extras,
    probe_models,
    probe_notebooks,
    probe_python,
    probe_triton,
)
from workbench.spec.errors import StorageError

MARKS = {"ok": "[green]ok[/]", "limited": "[yellow]limited[/]", "missing": "[red]missing[/]"}


def findings() -> list[Finding]:
    """Every probe's finding, in reading order; without torch, the probes that need it are left out."""
    core = probe_core()
    rows = [probe_python(), core]
    try:
        import torch  # noqa: F401 - the probes below import it themselves
    except ImportError as error:
        rows.append(Finding("torch", "missing", str(error), "Nothing can run.", "make setup", essential=True))
    else:
        gpu = probe_gpu()
        rows += [probe_cores(), probe_isa(), probe_memory(), _probe_cache(), gpu]
        rows += [probe_triton(gpu.status == "ok"), probe_compiler(), *probe_models()]
    return [*rows, *probe_extras(), probe_notebooks(), probe_browser()]


def _probe_cache() -> Finding:
    from workbench.models.cache import cache_dir

    try:
        return probe_disk(cache_dir())
    except StorageError as error:
        return Finding("disk", "missing", error.message, "Only shipped models work.", error.hint)


def report() -> dict[str, Any]:
    """``{"ready": bool, "findings": [{name, status, found, consequence, remedy, essential}]}``.

    ``ready`` is false only when something essential is missing.
    """
    rows = findings()
    ready = not any(row.essential and row.status == "missing" for row in rows)
    return {"ready": ready, "findings": [row.to_dict() for row in rows]}


def render(result: dict[str, Any], console: Console) -> None:
    """Print a report as a table, and below it what follows and what helps, per part that is not ok."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("part", "state", "found"):
        table.add_column(column, overflow="fold")
    for row in result["findings"]:
        table.add_row(row["name"], MARKS[row["status"]], row["found"])
    console.print(table)
    for row in result["findings"]:
        if row["status"] != "ok":
            console.print(f"\n[bold]{row['name']}[/]: {row['consequence']}", highlight=False)
            console.print(f"  → {row['remedy']}", markup=False, highlight=False)
    verdict = "ready" if result["ready"] else "not ready: something essential is missing"
    console.print(f"\n[bold]{verdict}[/]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; 0 when the workbench can run here, else 1."""
    parser = argparse.ArgumentParser(prog="workbench doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(arguments)
    result = report()
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        render(result, Console())
    return 0 if result["ready"] else 1


if __name__ == "__main__":
    sys.exit(main())
