"""``workbench kernels``: every kernel with its configurations, machine-code facts, bytes and operations.

The facts are counted in code compiled here and now, without a GPU, or taken from the cache of an earlier
compile of the same source; nothing is quoted.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from workbench.cli import options as o
from workbench.cli.output import Meter, out, print_json
from workbench.spec.errors import OptionError

#: Sizes that bytes and operations are shown for when none are given: one layer of a model of the size of
#: Llama 3 8B (experts: OLMoE), decoding 16 sequences of 8192 tokens, or one prompt of 8192.
TYPICAL: dict[str, Any] = {
    "M": 16,
    "N": 4096,
    "K": 4096,
    "batch": 16,
    "context": 8192,
    "q_lens": (8192,),
    "kv_lens": (8192,),
    "heads": 32,
    "kv_heads": 8,
    "dim": 128,
    "rows": 16,
    "parts": 8,
    "tokens": 16,
    "pages": 16,
    "page": 128,
    "sequences": 16,
    "nodes": 8,
    "judged": 16,
    "vocabulary": 128256,
    "blocks": 126,
    "T": 16,
    "k": 8,
    "E": 64,
    "H": 2048,
    "I": 1024,
}

# Facts worth a column when they are there: matrix units, TMA, copies, conversions, what costs.
SHOWN = (
    "HGMMA",
    "QGMMA",
    "IGMMA",
    "HMMA",
    "IMMA",
    "UTMALDG",
    "UTMASTG",
    "LDGSTS",
    "USETMAXREG",
    "I2F",
    "PRMT",
)


def list_kernels(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Only these.")] = None,
    sass: Annotated[
        bool, typer.Option("--sass", help="Print where the disassembly of each build is.")
    ] = False,
    arch: Annotated[int, typer.Option(help="90: Hopper (bounds are checked). 100: Blackwell.")] = 90,
    triton: Annotated[Path | None, typer.Option(help="A folder with another triton to compile with.")] = None,
    size: Annotated[
        list[str], typer.Option(metavar="NAME=N", help="A problem size for bytes and operations.")
    ] = [],  # noqa: B006 - the command-line library copies it
    jobs: Annotated[int, typer.Option(min=1, help="Compilers at a time.")] = 2,
    json: o.Json = False,
) -> None:
    """Compile the kernels ahead of time, show what their machine code holds (status 1: not as promised)."""
    from workbench.cli.benching import sizes_of
    from workbench.kernels import aot

    if arch not in (aot.HOPPER, aot.BLACKWELL):
        raise OptionError(f"--arch {arch} is not offered.", hint="Choose 90 or 100.")
    sizes = sizes_of(size)
    wanted = aot.requests(names or None, arch)
    known = {n for r in wanted for n in _size_names(r.kernel)}
    for name in sizes.keys() - known:
        raise OptionError(f"No kernel shown has a size {name!r}.", hint=f"Sizes: {', '.join(sorted(known))}.")
    with Meter("kernels") as meter:
        found = aot.compile_builds(
            wanted,
            triton=triton,
            jobs=jobs,
            progress=lambda done, total, result: meter(done / total, result.request.label),
        )
    rows = kernel_rows(found, sizes)
    if json:
        print_json({"kernels": rows})
    else:
        for row in rows:
            _show(row, sass)
    if not all(b["as_promised"] for row in rows for b in row["builds"]):
        raise typer.Exit(1)


def kernel_rows(compiled: list[Any], sizes: dict[str, int]) -> list[dict[str, Any]]:
    """One row per kernel, builds below it, in the order of the catalogue."""
    rows: dict[str, dict[str, Any]] = {}
    for result in compiled:
        kernel = result.request.kernel
        row = rows.setdefault(
            kernel.name,
            {
                "name": kernel.name,
                "title": kernel.title,
                "language": kernel.language,
                "source": kernel.source,
                "module": result.request.module,
                "cost": cost_row(kernel, sizes),
                "builds": [],
            },
        )
        row["builds"].append(_build_row(result))
    return list(rows.values())


def cost_row(kernel: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Sizes, operations and bytes of one problem; only the names of the sizes when some have no value."""
    parameters = inspect.signature(kernel.cost).parameters
    names = _size_names(kernel)
    given = {n: v for n, v in TYPICAL.items() if n in names}
    given |= {n: (v,) if n.endswith("_lens") else v for n, v in sizes.items() if n in names}
    missing = [n for n in names if parameters[n].default is inspect.Parameter.empty and n not in given]
    if missing:
        return {"sizes": given, "missing": missing}
    cost = kernel.cost(**given)
    return {
        "sizes": given,
        "flops": cost.flops,
        "bytes": cost.bytes,
        "flops_per_byte": cost.flops / cost.bytes if cost.bytes else None,
    }


def _size_names(kernel: Any) -> list[str]:
    parameters = inspect.signature(kernel.cost).parameters
    return [n for n, p in parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]


def _build_row(result: Any) -> dict[str, Any]:
    build, facts = result.request.build, result.facts
    hopper = result.request.arch == 90
    # Bounds are those of Hopper; elsewhere a build must compile, no more.
    broken = result.broken() if hopper or facts is None else []
    row = {
        "name": build.name,
        "arch": f"sm_{result.request.arch}a",
        "triton": result.triton,
        "warps": build.num_warps,
        "stages": build.num_stages,
        "constants": {k: str(v) for k, v in build.constants.items()},
        "negative_control": build.fails,
        "broken": broken,
        "as_promised": result.as_promised() if hopper else not broken,
        "error": result.error,
        "seconds": result.seconds,
        "cached": result.cached,
        "sass": result.sass,
        "facts": {},
    }
    if facts is not None:
        names = ("regs", "stack", "smem", "spills", "instructions", "overlap", "warnings")
        row["facts"] = {n: facts.value(n) for n in (*names, *SHOWN)} | {"opcodes": dict(facts.opcodes)}
        row["bounds"] = {n: str(b) for n, b in build.sass.items()} if hopper else {}
    return row


def _show(row: dict[str, Any], sass: bool) -> None:
    from rich.table import Table

    console = out()
    console.print(f"{row['name']}: {row['title']} ({row['language']}; {row['source']})", markup=False)
    cost = row["cost"]
    sizes = ", ".join(f"{k}={v}" for k, v in cost["sizes"].items())
    if "missing" in cost:
        console.print(
            f"  bytes and operations: give --size {'=N --size '.join(cost['missing'])}=N", markup=False
        )
    else:
        ratio = f", {cost['flops_per_byte']:.1f} per byte" if cost["flops_per_byte"] else ""
        shown = f"  {sizes}: {cost['flops'] / 1e9:.4g} GFLOP, {cost['bytes'] / 1e6:.4g} MB{ratio}"
        console.print(shown, markup=False)
    present = [n for n in SHOWN if any(b["facts"].get(n) for b in row["builds"])]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("  build", "warps", "regs", "spills", "smem", "overlap", *present, "promise"):
        table.add_column(column, justify="left" if column in ("  build", "promise") else "right")
    for build in row["builds"]:
        facts = build["facts"]
        cells = [f"{facts[n]:.0f}" if facts else "–" for n in ("regs", "spills", "smem", "overlap", *present)]
        table.add_row(f"  {build['name']}", str(build["warps"]), *cells, _verdict(build))
    console.print(table)
    if sass:
        for build in row["builds"]:
            console.print(
                f"  {build['name']}: {build['sass'] or build['error']}", markup=False, soft_wrap=True
            )
    console.print()


def _verdict(build: dict[str, Any]) -> str:
    if build["negative_control"] and not build["error"]:
        return "breaks, as a negative control must" if build["broken"] else "negative control that holds"
    return "; ".join(build["broken"]).replace("[", "\\[") or "kept"
