"""``workbench gpu-check``: prove every kernel on this GPU, measure it, hold it against its goals.

Results go to a folder, after every step; the table comes last. ``--plan`` shows what would be done, on any
machine. Status 1: wrong numbers, a missed must or a case not reached; 6: no GPU; 130: interrupted, what was
finished is kept.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli import options as o
from workbench.cli.output import Meter, interruptible, note, out, print_json
from workbench.cli.start import CANCELLED

OUT = Path("gpu-check")


def gpu_check(
    only: Annotated[
        list[str], typer.Option(metavar="NAME", help="Only this kernel or case; may be repeated.")
    ] = [],  # noqa: B006 - the command-line library copies it
    plan: Annotated[
        bool, typer.Option("--plan", help="Show cases, floors and expected time; needs no GPU.")
    ] = False,
    folder: Annotated[Path, typer.Option("--out", help="Folder for results.json and report.html.")] = OUT,
    limit: Annotated[float, typer.Option(min=1, help="Seconds after which no case is begun.")] = 400.0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that compile ahead.")] = 8,
    prove: Annotated[bool, typer.Option("--prove", help="Correctness only: no ceilings, no timing.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the data; default: a fresh one.")] = None,
    json: o.Json = False,
) -> None:
    """Prove and measure the GPU kernels (status 1: wrong numbers or a missed must)."""
    from workbench.kernels.bench import device, roster
    from workbench.kernels.bench.plan import planned

    cases = roster.chosen(only)
    if plan:
        found = planned(cases, jobs)
        print_json(found) if json else _show_plan(found)
        return
    device.require_gpu()
    record = check(cases, folder, limit, jobs, not prove, seed)
    if json:
        print_json(record)
    else:
        show(record, folder)
    if record["state"] == "interrupted":
        raise typer.Exit(CANCELLED)
    if not record["verdict"]["ok"]:
        raise typer.Exit(1)


def check(
    cases: list[Any], folder: Path, limit: float, jobs: int, measure: bool, seed: int | None, on: str = "cuda"
) -> dict[str, Any]:
    """Run the session, writing the folder as it goes; the record at its end."""
    from workbench.kernels.bench import device, files
    from workbench.kernels.bench.session import Session
    from workbench.kernels.bench.watch import Child, command

    files.prepare(folder)
    record: dict[str, Any] = {
        "tool": "workbench gpu-check",
        "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": device.versions(),
        "smi_before": device.described(),
    }
    with interruptible() as cancel, Meter("gpu-check") as meter:
        Session(
            cases,
            lambda stop: Child(command(on), stop=stop),
            seed=int.from_bytes(os.urandom(4), "little") if seed is None else seed,
            limit=limit,
            jobs=jobs,
            measure=measure,
            save=lambda r: files.save(folder, r),
            tell=meter,
            stopped=cancel.is_set,
            record=record,
        ).run()
    record["smi_after"] = device.described()
    files.save(folder, record)
    files.report(folder, record)
    return record


def show(record: dict[str, Any], folder: Path) -> None:
    """The table: proofs in one line a kernel, then each measured case with its marks, then the verdict."""
    from rich.table import Table

    from workbench.kernels.bench import words

    console = out()
    name = record["device"].get("name", "the GPU")
    console.print(f"{name}: {record['state']} after {record['seconds']:.0f} s", markup=False)
    for name, c in record["ceilings"].items():
        found = f"{c['rate'] / 1e12:.4g} x 10^12/s" if "rate" in c else c.get("error", "not measured")
        console.print(f"  ceiling {name}: {found} ({c['what']})", markup=False)
    for row in record["cases"]:
        if not row["timed"] and row["state"] != "passed":
            console.print(f"  {row['key']}: {row['state']} {row['reason']}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("case", "rate", "ceiling", "time", "goals and baselines"):
        table.add_column(column, justify="right" if column in ("rate", "ceiling", "time") else "left")
    for row in (r for r in record["cases"] if r["timed"]):
        said = [words.goal(g) for g in row["goals"]]
        said += [f"{n}: {words.beside(b)}" for n, b in row.get("baselines", {}).items()]
        if row["state"] != "measured":
            said.insert(0, f"{row['state']} {row['reason']}".strip())
        shown = (words.rate(row), words.percent(row.get("fraction")), words.time(row.get("seconds")))
        table.add_row(row["key"], *shown, "\n".join(said).replace("[", "\\["))
    console.print(table)
    for row in record["relations"]:
        goals = "; ".join(words.goal(g) for g in row["goals"])
        console.print(f"  {row['kernel']}, {row['what']}: {words.times(row['value'])} {goals}", markup=False)
    counts = record["verdict"]["states"] | record["verdict"]["goals"]
    console.print(", ".join(f"{n} {what}" for what, n in counts.items()), markup=False)
    console.print(f"results and report: {folder}", markup=False, soft_wrap=True)


def _show_plan(found: dict[str, Any]) -> None:
    from rich.table import Table

    from workbench.kernels.bench import words

    console = out()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("case", "to do", "floor", "bound by", "goals, switches"):
        table.add_column(column, justify="right" if column == "floor" else "left")
    for row in found["cases"]:
        said = [words.marks(g) for g in row["goals"]] + [f"also {v}" for v in row["variants"]]
        floor = words.time(row["claimed_floor"]) if row["timed"] else ""
        kind = "measure" if row["timed"] else "prove"
        table.add_row(row["key"], kind, floor, row["bound"] if row["timed"] else "", "; ".join(said))
    console.print(table)
    for name in found["uncovered"]:
        console.print(f"{name}: no cases", markup=False)
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found["phases"].items())
    console.print(f"floors are of the H200's data sheet and sum to {found['floors_ms']:.1f} ms", markup=False)
    console.print(f"expected: {found['seconds']:.0f} s ({phases})", markup=False)
    if found["seconds"] > 400:
        note("more than the limit of 400 s: what is not reached is said so")
